"""What a user of `cdopt.nn` 0.5.5 runs into, and that `constraints` does not have it.

Each test shows a trap in cdopt itself, so that a release that mends it is noticed, and
beside it what the package does. Where the package does no better, the test says so.
"""

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from cdopt.manifold_torch import oblique_torch, sphere_torch, stiefel_torch
from cdopt.nn import (
    Conv2d_cdopt,
    GRU_cdopt,
    Linear_cdopt,
    LSTM_cdopt,
    RNN_cdopt,
    RNNCell_cdopt,
    get_constraint_violation,
    get_quad_penalty,
)
from cdopt.nn.modules.utils import set_forward_type
from cdopt.nn.utils.set_constraints import set_constraint_dissolving
from constraint_roles import message
from torch import nn, optim
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints import dissolve, dissolve_recurrent
from cdopt_tutorial.engines import Role, launch

F64 = {"dtype": torch.float64}
STIEFEL = {"manifold_class": stiefel_torch, "penalty_param": 0.1, **F64}
OBLIQUE = {**STIEFEL, "manifold_class": oblique_torch}
X = torch.ones(5, 3, 8, **F64)

recurrent = pytest.mark.parametrize(
    ("theirs", "plain"),
    [(RNN_cdopt, nn.RNN), (GRU_cdopt, nn.GRU), (LSTM_cdopt, nn.LSTM)],
)


def layers():
    """A Stiefel layer from 8 to 4 of cdopt, and one of ours."""
    return Linear_cdopt(8, 4, **STIEFEL), dissolve(nn.Linear(8, 4, **F64))


def free(layer, name="weight"):
    """The tensor that an optimizer is to move: W, not A(W)."""
    if hasattr(layer, "parametrizations"):
        return layer.parametrizations[name].original
    return getattr(layer, name)


@torch.no_grad()
def scale_(layer, factor, name="weight"):
    """Leave the manifold: WᵀW becomes factor² times what it was."""
    free(layer, name).mul_(factor)
    return layer


def off(w):
    """‖WᵀW − I‖ of the short side."""
    tall = w if w.shape[0] >= w.shape[1] else w.mT
    return (tall.mT @ tall - torch.eye(tall.shape[1], **F64)).norm().item()


def penalty(layer):
    """By cdopt's own function for a layer of cdopt, and by ours for ours."""
    by_cdopt = hasattr(layer, "quad_penalty")
    return get_quad_penalty(layer) if by_cdopt else constraints.penalty(layer)


def fit_(layer, steps, loss=lambda: 0.0):
    """Plain SGD on a loss and the penalty."""
    optimizer = optim.SGD(layer.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (loss() + penalty(layer)).backward()
        optimizer.step()


def moves(layer, name="weight_hh_l0"):
    """Whether a step moves the free weight of a recurrent layer."""
    before = free(layer, name).detach().clone()
    fit_(layer, 1, lambda: layer(X)[0].square().mean())
    return not torch.equal(before, free(layer, name))


class TestRecurrent:
    def test_gates(self):
        """LSTM_cdopt makes the four gates orthogonal as one matrix, none of them."""
        theirs = LSTM_cdopt(8, 16, **STIEFEL)
        of_gates = torch.linalg.svdvals(torch.stack(theirs.weight_hh_l0.chunk(4)))
        assert off(theirs.weight_hh_l0) < 1e-12
        assert of_gates.min() < 0.1 and of_gates.max() < 0.95
        ours = dissolve_recurrent(nn.LSTM(8, 16, **F64), per_gate=True)
        assert max(off(gate) for gate in ours.weight_hh_l0.chunk(4)) < 1e-12

    def test_vanishing_gradients(self):
        """An LSTM_cdopt forgets as fast as an LSTM; only a Stiefel RNN does not.

        With orthogonal gates an LSTM forgets thousands of times less, which is far
        from a cure: what remains is the gates' own factors, below 1.
        """
        of_rnn = dissolve_recurrent(nn.RNN(4, 32, **F64))
        by_gate = dissolve_recurrent(nn.LSTM(4, 32, **F64), per_gate=True)
        assert 1e-4 < gradient_through_time(of_rnn) < 1
        for layer in nn.LSTM(4, 32, **F64), LSTM_cdopt(4, 32, **STIEFEL):
            assert gradient_through_time(layer) < 1e-9
        assert 1e-9 < gradient_through_time(by_gate) < 1e-6

    @recurrent
    def test_plain_tensor(self, theirs, plain):
        """weight_hh of cdopt is no Parameter, but is trained and saved like one."""
        theirs, ours = theirs(8, 6, **STIEFEL), dissolve_recurrent(plain(8, 6, **F64))
        assert type(theirs.weight_hh_l0) is torch.Tensor
        assert type(free(ours, "weight_hh_l0")) is nn.Parameter
        assert any(p is theirs.weight_hh_l0 for p in theirs.parameters())
        assert "weight_hh_l0" in theirs.state_dict()
        assert moves(theirs) and moves(ours)

    @recurrent
    @pytest.mark.parametrize("manifold", [oblique_torch, sphere_torch])
    def test_frozen(self, theirs, plain, manifold):
        """On the oblique manifold and the sphere cdopt never trains weight_hh."""
        theirs = theirs(8, 6, **STIEFEL | {"manifold_class": manifold})
        assert not theirs.weight_hh_l0.requires_grad and not moves(theirs)
        assert moves(dissolve_recurrent(plain(8, 6, **F64), manifold=manifold))

    @recurrent
    def test_reset_parameters(self, theirs, plain):
        """After reset_parameters cdopt computes with the old weight, trains the new.

        Ours trains the one that it computes with, but has to be projected first.
        """
        theirs, ours = theirs(8, 6, **STIEFEL), dissolve_recurrent(plain(8, 6, **F64))
        for layer in theirs, ours:
            layer.reset_parameters()
        assert not moves(theirs) and theirs.weight_hh_l0.grad is None
        assert constraints.feasibility(ours).mapped > 0.1
        constraints.project_(ours)
        assert constraints.feasibility(ours).mapped < 1e-12 and moves(ours)

    def test_functional_call(self):
        """functional_call ignores the weights that it is given for an LSTM_cdopt."""
        for make, right in (
            (lambda: LSTM_cdopt(8, 6, **STIEFEL), False),
            (lambda: dissolve_recurrent(nn.LSTM(8, 6, **F64)), True),
        ):
            one, other = make(), make()
            called = torch.func.functional_call(other, dict(one.named_parameters()), X)
            assert torch.equal(called[0], one(X)[0]) is right

    def test_loading(self):
        """An LSTM_cdopt loads by copy, but not by assignment and not onto meta."""
        one, other = LSTM_cdopt(8, 6, **STIEFEL), LSTM_cdopt(8, 6, **STIEFEL)
        with pytest.raises(RuntimeError, match="cannot assign .* as parameter"):
            other.load_state_dict(one.state_dict(), assign=True)
        with pytest.raises(AssertionError):
            copy.deepcopy(other).to("meta")
        mine, yours = (dissolve_recurrent(nn.LSTM(8, 6, **F64)) for _ in range(2))
        yours.to("meta").load_state_dict(mine.state_dict(), assign=True)
        other.load_state_dict(one.state_dict())
        assert torch.equal(one(X)[0], other(X)[0])
        assert torch.equal(mine(X)[0], yours(X)[0])

    def test_projections(self):
        """proj_size fails in cdopt: its manifold has the size of the hidden state."""
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            LSTM_cdopt(8, 6, proj_size=3, **STIEFEL)
        ours = dissolve_recurrent(nn.LSTM(8, 6, proj_size=3, **F64))
        assert off(ours.weight_hh_l0) < 1e-12 and moves(ours)


def gradient_through_time(layer, steps=50):
    """‖∂h_T/∂h_0 · v‖ / ‖v‖ for a random v."""
    hidden = torch.zeros(1, 1, layer.hidden_size, requires_grad=True, **F64)
    state = (hidden, torch.zeros_like(hidden)) if layer.mode == "LSTM" else hidden
    last = layer(torch.randn(steps, 1, layer.input_size, **F64), state)[0][-1]
    v = torch.randn_like(last)
    (through,) = torch.autograd.grad(last, hidden, v)
    return (through.norm() / v.norm()).item()


class TestLinear:
    def test_identity_is_a_parameter(self):
        """Linear_cdopt counts and saves an identity matrix among its parameters."""
        theirs, ours = layers()
        assert sum(p.numel() for p in theirs.parameters()) == 8 * 4 + 4 + 4 * 4
        assert sum(p.numel() for p in ours.parameters()) == 8 * 4 + 4
        with pytest.raises(RuntimeError, match='Unexpected .*"Ip"'):
            nn.Linear(8, 4).load_state_dict(theirs.state_dict())

    def test_reset_parameters(self):
        """reset_parameters of a Linear_cdopt takes its weight from the optimizer.

        Of a dissolved linear layer it draws a new bias only: torch draws into A(W).
        """
        theirs, ours = layers()
        before = free(theirs), free(ours), free(ours).detach().clone()
        for layer in theirs, ours:
            layer.reset_parameters()
        assert free(theirs) is not before[0] and free(ours) is before[1]
        assert torch.equal(free(ours), before[2])

    def test_identity_is_trained(self):
        """Freeze and unfreeze a Linear_cdopt, and training moves its constraint."""
        theirs, ours = layers()
        for layer in theirs, ours:
            scale_(layer, 1.5).requires_grad_(False).requires_grad_(True)
            fit_(layer, 400)
            assert penalty(layer) < 1e-12
        assert off(theirs.weight) > 0.3 and off(free(ours)) < 1e-6

    def test_identity_is_initialised(self):
        """Initialise all parameters of a Linear_cdopt, and its constraint is noise."""
        theirs, ours = layers()
        for parameter in [*theirs.parameters(), *ours.parameters()]:
            nn.init.uniform_(parameter, -0.1, 0.1)
        assert not torch.equal(theirs.Ip, torch.eye(4, **F64))
        for layer in theirs, ours:
            free(layer).data = torch.eye(4, 8, **F64)
        assert penalty(theirs) > 0.1 and penalty(ours) == 0


class TestCopies:
    def test_pickle(self):
        """No layer of cdopt pickles: none can be sent to a worker or saved whole."""
        for sizes, make in {
            (8, 4): Linear_cdopt,
            (3, 4, 3): Conv2d_cdopt,
            (8, 6): LSTM_cdopt,
        }.items():
            with pytest.raises(AttributeError, match="Can't pickle local object"):
                pickle.dumps(make(*sizes, **STIEFEL))
        pickle.dumps(layers()[1])

    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (lambda: Linear_cdopt(8, 4, **STIEFEL), "weight"),
            (lambda: Conv2d_cdopt(3, 4, 3, **STIEFEL), "weight"),
            (lambda: RNNCell_cdopt(8, 4, **STIEFEL), "weight_hh"),
        ],
    )
    def test_deepcopy(self, make, name):
        """The penalty of a deepcopy still measures, and trains, the original."""
        layer = make()
        duplicate = scale_(copy.deepcopy(layer), 2, name)
        assert get_quad_penalty(duplicate) < 1e-20
        get_quad_penalty(duplicate).backward()
        assert free(duplicate, name).grad is None
        assert free(layer, name).grad is not None

    def test_conversion(self):
        """double() moves the constraint along, but set_constraint_dissolving does not.

        It takes float32 whatever the layer is, and remembers that for later calls.
        """
        single = STIEFEL | {"dtype": torch.float32}
        for layer in Linear_cdopt(8, 4, **single), LSTM_cdopt(8, 4, **single):
            assert get_quad_penalty(layer.double()).dtype == torch.float64
        layer = nn.Linear(8, 4, **F64)
        set_constraint_dissolving(layer, "weight", stiefel_torch)
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            layer(X)
        arguments = inspect.signature(set_constraint_dissolving).parameters
        assert arguments["manifold_args"].default == {"dtype": torch.float32}
        ours = dissolve(nn.Linear(8, 4)).double()
        assert ours(X).dtype == constraints.penalty(ours).dtype == torch.float64


class TestPenalty:
    def test_factor(self):
        """penalty_param is half of the papers' β, which the manifolds take."""
        theirs, ours = (scale_(layer, 1.1) for layer in layers())
        c = 1.1**2 - 1  # times the identity of size 4
        x = theirs.weight.mT
        with_beta = theirs.manifold.generate_cdf_fun(lambda _: 0.0, beta=0.2)(x)
        for each in penalty(theirs), constraints.penalty(theirs), penalty(ours):
            assert each.item() == pytest.approx(0.1 * 4 * c**2)
            assert each.item() == pytest.approx(with_beta.item())

    def test_no_penalty_by_default(self):
        """cdopt's default penalty is 0: a layer can leave its manifold in silence."""
        theirs = scale_(Linear_cdopt(8, 4, manifold_class=stiefel_torch, **F64), 3)
        assert get_quad_penalty(theirs) == 0
        with pytest.raises(ValueError, match="penalty_param of weight is 0"):
            constraints.penalty(theirs)
        assert penalty(scale_(dissolve(nn.Linear(8, 4, **F64)), 3)) > 0

    def test_drift(self):
        """Without a penalty, a fit that strains the constraint can run away.

        It does from some starts, this one among them, and from others it does not.
        """
        torch.manual_seed(2)
        theirs = Linear_cdopt(8, 4, manifold_class=stiefel_torch, **F64)
        ours, target = dissolve(nn.Linear(8, 4, **F64)), torch.randn(4, 8, **F64)
        free(ours).data.copy_(theirs.weight)
        for layer in theirs, ours:

            def loss(layer=layer):
                x = torch.randn(16, 8, **F64)
                return (layer(x) - x @ target.mT).square().mean()

            fit_(layer, 300, loss)
        assert off(theirs.weight) > 0.5 and off(free(ours)) < 0.1

    def test_no_manifold_by_default(self):
        """Without manifold_class cdopt constrains nothing, and the penalty is 0."""
        theirs = scale_(Linear_cdopt(8, 4, penalty_param=0.1, **F64), 3)
        assert get_quad_penalty(theirs) == 0
        with pytest.raises(ValueError, match="no weight of this model is constrained"):
            constraints.penalty(theirs)

    def test_of_nothing(self):
        """get_quad_penalty is the integer 0 for a model without constraints."""
        model = nn.Sequential(nn.Linear(8, 4))
        assert type(get_quad_penalty(model)) is int and get_quad_penalty(model) == 0
        assert get_constraint_violation(model) == 0
        with pytest.raises(ValueError, match="no weight of this model is constrained"):
            constraints.penalty(model)

    def test_of_a_shared_layer(self):
        """get_quad_penalty counts a layer that two parents share twice."""
        theirs, ours = layers()
        for layer, function, times in (
            (theirs, get_quad_penalty, 2),
            (theirs, constraints.penalty, 1),
            (ours, constraints.penalty, 1),
        ):
            one = function(scale_(layer, 1.1)).item()
            twice = nn.Sequential(layer, nn.Sequential(layer))
            assert function(twice).item() == pytest.approx(times * one)

    @pytest.mark.filterwarnings("ignore")  # of a tensor with a graph made a number
    def test_violation(self):
        """The quadratic penalty is no distance: it is squared, and has a factor."""
        theirs, ours = (scale_(layer, 1.1) for layer in layers())
        # C = 0.21 I, of size 4
        assert get_quad_penalty(theirs).item() == pytest.approx(0.1 * 0.42**2)
        assert theirs.quad_penalty().item() == pytest.approx(0.42**2)
        assert constraints.feasibility(ours).weight == pytest.approx(0.42)
        violation = get_constraint_violation(theirs)
        assert violation.item() == pytest.approx(0.42) and not violation.requires_grad

    def test_feasibility_in_a_loss(self):
        """The gradient of cdopt's recurrent feasibility() is NaN on the manifold."""
        theirs = RNN_cdopt(8, 4, **STIEFEL)
        ours = dissolve_recurrent(nn.RNN(8, 4, **F64))
        for layer in theirs, ours:
            free(layer, "weight_hh_l0").data.copy_(torch.eye(4))
        theirs.feasibility().backward()
        assert theirs.weight_hh_l0.grad.isnan().all()
        constraints.penalty(ours).backward()
        assert not free(ours, "weight_hh_l0").grad.any()

    def test_set_forward_type(self):
        """set_forward_type(model, False) changes nothing."""
        theirs = Linear_cdopt(8, 4, **STIEFEL)
        set_forward_type(theirs, False)
        assert theirs.forward_with_A


class TestMap:
    @pytest.mark.parametrize("columns", [1, 4, 16])
    def test_stiefel(self, columns):
        """The penalty is on W, the output from A(W), and C(A) = −¾ C² + ¼ C³."""
        layer = dissolve(nn.Linear(columns, 20, **F64))
        free(layer).data.add_(0.01 * torch.randn_like(free(layer)))
        w, a = free(layer).detach(), layer.weight.detach()
        c, mapped = (x.mT @ x - torch.eye(columns, **F64) for x in (w, a))
        torch.testing.assert_close(mapped, -0.75 * c @ c + 0.25 * c @ c @ c)
        found = constraints.feasibility(layer)
        assert found.weight == pytest.approx(c.norm().item())
        assert found.mapped == pytest.approx(mapped.norm().item())

    def test_is_not_a_projection(self):
        """Twice an orthogonal W is mapped to its negative: feasible, while W is not."""
        layer = scale_(layers()[1], 2)
        found = constraints.feasibility(layer)
        assert found.weight == pytest.approx(6) and found.mapped < 1e-12
        torch.testing.assert_close(layer.weight, -free(layer) / 2)

    @pytest.mark.parametrize(("inputs", "outputs"), [(8, 4), (4, 8), (4, 4)])
    def test_which_vectors(self, inputs, outputs):
        """Oblique Linear_cdopt: unit columns (inputs), unit rows only if they are more.

        Ours are always rows, one vector for each output.
        """
        theirs = Linear_cdopt(inputs, outputs, **OBLIQUE).weight
        ours = dissolve(nn.Linear(inputs, outputs, **F64), manifold="oblique").weight
        one = torch.ones(1, **F64)
        columns, rows = (torch.allclose(theirs.norm(dim=d), one) for d in (0, 1))
        assert (columns, rows) == (inputs >= outputs, inputs < outputs)
        assert torch.allclose(ours.norm(dim=1), one)


class TestDistributed:
    def test_training(self):
        """On a worker, too, a Stiefel LSTM_cdopt is trained, an oblique one is not."""
        found = launch({"trainer": Role(train)})["trainer"]
        assert found["moved"] == [True, False, True]
        assert "``children`` not supported for RemoteModule" in found["theirs"]
        assert "no weight of this model is constrained" in found["ours"]


def train():
    """What moves by RRefs, and the penalties of a RemoteModule."""
    remote = RemoteModule("trainer/cpu", nn.Linear, (8, 4))
    ours = dissolve_recurrent(nn.LSTM(8, 4, **F64), manifold="oblique")
    lstms = [LSTM_cdopt(8, 4, **STIEFEL), LSTM_cdopt(8, 4, **OBLIQUE), ours]
    weights = [free(lstm, "weight_hh_l0") for lstm in lstms]
    before = [weight.detach().clone() for weight in weights]
    rrefs = [RRef(p) for lstm in lstms for p in lstm.parameters()]
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.1)
    with dist_autograd.context() as context:
        loss = sum(lstm(X)[0].square().sum() for lstm in lstms)
        dist_autograd.backward(context, [loss + constraints.penalty(*lstms)])
        optimizer.step(context)
    pairs = zip(before, weights, strict=True)
    return {
        "moved": [not torch.equal(old, new) for old, new in pairs],
        "theirs": message(get_quad_penalty, remote),
        "ours": message(constraints.penalty, remote),
    }
