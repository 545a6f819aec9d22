"""What a user of `cdopt.nn` 0.5.5 runs into, and that `constraints` does not have it.

Each test shows a trap in cdopt itself, so that a release that mends it is noticed, and
beside it what the package does. Where the package does no better, the test says so.
"""

import copy
import pickle

import pytest
import torch
from cdopt import nn as theirs
from cdopt.manifold_torch import oblique_torch, sphere_torch, stiefel_torch
from cdopt.nn import get_constraint_violation, get_quad_penalty
from torch import nn, optim

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints import dissolve, dissolve_recurrent

F64 = {"dtype": torch.float64}
STIEFEL = {"manifold_class": stiefel_torch, "penalty_param": 0.1, **F64}
X = torch.ones(5, 3, 8, **F64)
every_kind = pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])


def linears(factor=1.0):
    """A Stiefel layer from 8 to 4 of cdopt, and one of ours; off it by a factor."""
    pair = theirs.Linear_cdopt(8, 4, **STIEFEL), dissolve(nn.Linear(8, 4, **F64))
    for layer in pair:
        free(layer).data.mul_(factor)
    return pair


def recurrents(kind="LSTM", manifold=stiefel_torch, **options):
    """A recurrent layer from 8 to 6 of cdopt, and one of ours."""
    how = STIEFEL | {"manifold_class": manifold}
    plain = getattr(nn, kind)(8, 6, **F64, **options)
    ours = dissolve_recurrent(plain, manifold=manifold)
    return getattr(theirs, f"{kind}_cdopt")(8, 6, **how), ours


def free(layer, name="weight"):
    """The tensor that an optimizer is to move: W, not A(W)."""
    if hasattr(layer, "parametrizations"):
        return layer.parametrizations[name].original
    return getattr(layer, name)


def moves(layer, name="weight_hh_l0"):
    """Whether a step moves the free weight of a recurrent layer."""
    before = free(layer, name).detach().clone()
    optimizer = optim.SGD(layer.parameters(), 0.05)
    layer(X)[0].square().mean().backward()
    optimizer.step()
    return not torch.equal(before, free(layer, name))


def test_gates():
    """LSTM_cdopt makes the four gates orthogonal as one matrix, none of them."""
    stacked = theirs.LSTM_cdopt(8, 16, **STIEFEL).weight_hh_l0
    torch.testing.assert_close(stacked.mT @ stacked, torch.eye(16, **F64))
    of_gates = torch.linalg.svdvals(torch.stack(stacked.chunk(4)))
    assert of_gates.min() < 0.1 and of_gates.max() < 0.95
    ours = dissolve_recurrent(nn.LSTM(8, 16, **F64), per_gate=True)
    for gate in ours.weight_hh_l0.chunk(4):
        torch.testing.assert_close(gate.mT @ gate, torch.eye(16, **F64))


@every_kind
@pytest.mark.parametrize("manifold", [oblique_torch, sphere_torch])
def test_frozen(kind, manifold):
    """On the oblique manifold and the sphere cdopt never trains weight_hh."""
    by_cdopt, ours = recurrents(kind, manifold)
    assert not by_cdopt.weight_hh_l0.requires_grad and not moves(by_cdopt)
    assert moves(ours)


@every_kind
def test_reset_parameters(kind):
    """After it cdopt computes with the old recurrent weight, and trains the new.

    Ours trains the one that it computes with, but has to be projected first. A new
    weight of a Linear_cdopt is not the optimizer's; ours keeps it, and draws a bias.
    """
    by_cdopt, ours = recurrents(kind)
    by_cdopt.reset_parameters()
    ours.reset_parameters()
    assert not moves(by_cdopt) and by_cdopt.weight_hh_l0.grad is None
    assert constraints.feasibility(ours).mapped < 1e-12 and moves(ours)
    for layer, stays in zip(linears(), (False, True), strict=True):
        before = free(layer)
        layer.reset_parameters()
        assert (free(layer) is before) == stays


def test_projections():
    """proj_size fails in cdopt: its manifold has the size of the hidden state."""
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        theirs.LSTM_cdopt(8, 6, proj_size=3, **STIEFEL)
    assert moves(recurrents(proj_size=3)[1])


def test_identity():
    """Linear_cdopt counts, saves and thaws an identity matrix as a parameter."""
    by_cdopt, ours = linears(1.5)
    with pytest.raises(RuntimeError, match='Unexpected .*"Ip"'):
        nn.Linear(8, 4).load_state_dict(by_cdopt.state_dict())
    counts = [sum(p.numel() for p in each.parameters()) for each in (by_cdopt, ours)]
    assert counts == [8 * 4 + 4 + 4 * 4, 8 * 4 + 4]
    by_cdopt.requires_grad_(False).requires_grad_(True)
    get_quad_penalty(by_cdopt).backward()
    assert by_cdopt.Ip.grad.any()


def test_pickle():
    """No layer of cdopt pickles: none can be sent to a worker or saved whole."""
    convolution = theirs.Conv2d_cdopt(3, 4, 3, **STIEFEL)
    for layer in linears()[0], convolution, recurrents()[0]:
        with pytest.raises(AttributeError, match="Can't pickle local object"):
            pickle.dumps(layer)
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(linears()[1])


def test_deepcopy():
    """The penalty of a deepcopy still measures, and trains, the original."""
    for layer, name in (
        (theirs.Linear_cdopt(8, 4, **STIEFEL), "weight"),
        (theirs.Conv2d_cdopt(3, 4, 3, **STIEFEL), "weight"),
        (theirs.RNNCell_cdopt(8, 4, **STIEFEL), "weight_hh"),
    ):
        duplicate = copy.deepcopy(layer)
        free(duplicate, name).data.mul_(2)
        assert get_quad_penalty(duplicate) < 1e-20
        get_quad_penalty(duplicate).backward()
        assert free(duplicate, name).grad is None
        assert free(layer, name).grad is not None


def test_defaults():
    """Without penalty_param, or without a manifold, cdopt's penalty is 0 in silence."""
    for options, why in (
        ({"manifold_class": stiefel_torch}, "penalty_param of weight is 0"),
        ({"penalty_param": 0.1}, "no weight of this model is constrained"),
    ):
        layer = theirs.Linear_cdopt(8, 4, **options, **F64)
        layer.weight.data.mul_(3)
        assert get_quad_penalty(layer) == 0
        with pytest.raises(ValueError, match=why):
            constraints.penalty(layer)
    assert type(get_quad_penalty(nn.Linear(8, 4))) is int
    assert constraints.penalty(linears(3)[1]) > 0


def test_of_a_shared_layer():
    """get_quad_penalty counts a layer that two parents share twice."""
    by_cdopt, ours = linears(1.1)
    for layer, penalty, times in (
        (by_cdopt, get_quad_penalty, 2),
        (by_cdopt, constraints.penalty, 1),
        (ours, constraints.penalty, 1),
    ):
        twice = nn.Sequential(layer, nn.Sequential(layer))
        assert penalty(twice).item() == pytest.approx(times * penalty(layer).item())


@pytest.mark.filterwarnings("ignore")  # of a tensor with a graph made a number
def test_violation():
    """The penalty is no distance: it is squared, and has half of the papers' β."""
    by_cdopt, ours = linears(1.1)
    with_beta = by_cdopt.manifold.generate_cdf_fun(lambda _: 0.0, beta=0.2)
    c = 0.42  # C = 0.21 I, of size 4
    for penalty in get_quad_penalty(by_cdopt), constraints.penalty(ours):
        assert penalty.item() == pytest.approx(0.1 * c**2)
        assert penalty.item() == pytest.approx(with_beta(by_cdopt.weight.mT).item())
    assert by_cdopt.quad_penalty().item() == pytest.approx(c**2)
    assert get_constraint_violation(by_cdopt).item() == pytest.approx(c)
    assert constraints.feasibility(ours).weight == pytest.approx(c)


def test_map():
    """C(A) = −¾ C² + ¼ C³, so 2 W is mapped to −W, feasible, if W is orthogonal."""
    for factor in (1.1, 2):
        layer, c = linears(factor)[1], factor**2 - 1
        found, mapped = constraints.feasibility(layer), -0.75 * c**2 + 0.25 * c**3
        assert found.weight == pytest.approx(2 * c)  # ‖I‖ is 2
        assert found.mapped == pytest.approx(2 * abs(mapped), abs=1e-12)
    torch.testing.assert_close(layer.weight, -free(layer) / 2)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 4), (4, 8), (4, 4)])
def test_which_vectors(inputs, outputs):
    """Oblique Linear_cdopt: unit columns, or rows if they are more; ours are rows."""
    oblique = STIEFEL | {"manifold_class": oblique_torch}
    weight = theirs.Linear_cdopt(inputs, outputs, **oblique).weight
    ours = dissolve(nn.Linear(inputs, outputs, **F64), manifold="oblique").weight
    one = torch.ones(1, **F64)
    columns, rows = (torch.allclose(weight.norm(dim=d), one) for d in (0, 1))
    assert (columns, rows) == (inputs >= outputs, inputs < outputs)
    assert torch.allclose(ours.norm(dim=1), one)
