"""What a user of `cdopt.nn` 0.5.5 runs into: the traps that the errata name.

Each test shows a trap in cdopt itself, so that a release that mends it is noticed. What
the package does instead is tested with `constraints`, or here, if the errata say so.
"""

import copy
import pickle

import pytest
import torch
from cdopt import nn as theirs
from cdopt.manifold_torch import oblique_torch, sphere_torch, stiefel_torch
from cdopt.nn import get_quad_penalty
from constrained import F64, dissolved, move_
from torch import nn, optim

from cdopt_tutorial import constraints

STIEFEL = {"manifold_class": stiefel_torch, "penalty_param": 0.1, **F64}


def linear():
    return theirs.Linear_cdopt(8, 4, **STIEFEL)


def moves(rnn):
    """Whether a step moves the recurrent weight."""
    before, optimizer = rnn.weight_hh_l0.clone(), optim.SGD(rnn.parameters(), 0.05)
    rnn(torch.ones(5, 3, 8, **F64))[0].square().mean().backward()
    optimizer.step()
    return not torch.equal(before, rnn.weight_hh_l0)


def test_gates():
    """LSTM_cdopt makes the four gates orthogonal as one matrix, none of them."""
    stacked = theirs.LSTM_cdopt(8, 16, **STIEFEL).weight_hh_l0
    torch.testing.assert_close(stacked.mT @ stacked, torch.eye(16, **F64))
    assert torch.linalg.svdvals(torch.stack(stacked.chunk(4))).max() < 0.95


def test_frozen():
    """On the oblique manifold and the sphere cdopt never trains weight_hh."""
    for manifold in oblique_torch, sphere_torch:
        rnn = theirs.GRU_cdopt(8, 6, **STIEFEL | {"manifold_class": manifold})
        assert not rnn.weight_hh_l0.requires_grad and not moves(rnn)


def test_reset_parameters():
    """After it cdopt computes with the old recurrent weight, and trains the new.

    A new weight of a Linear_cdopt is not the optimizer's; a dissolved layer keeps it.
    """
    rnn = theirs.GRU_cdopt(8, 6, **STIEFEL)
    rnn.reset_parameters()
    assert not moves(rnn) and rnn.weight_hh_l0.grad is None
    for layer, stays in (linear(), False), (dissolved(), True):
        before = set(layer.parameters())
        layer.reset_parameters()
        assert (set(layer.parameters()) == before) == stays


def test_identity():
    """Linear_cdopt counts, saves and thaws an identity matrix as a parameter."""
    layer = move_(linear())
    with pytest.raises(RuntimeError, match='Unexpected .*"Ip"'):
        nn.Linear(8, 4).load_state_dict(layer.state_dict())
    layer.requires_grad_(False).requires_grad_(True)
    get_quad_penalty(layer).backward()
    assert layer.Ip.grad.any()


def test_pickle():
    """No layer of cdopt pickles: none can be sent to a worker or saved whole."""
    for layer in linear(), theirs.LSTM_cdopt(8, 6, **STIEFEL):
        with pytest.raises(AttributeError, match="Can't pickle local object"):
            pickle.dumps(layer)


def test_deepcopy():
    """The penalty of a deepcopy still measures, and trains, the original."""
    duplicate = move_(copy.deepcopy(layer := linear()), 2)
    get_quad_penalty(duplicate).backward()
    assert get_quad_penalty(duplicate) < 1e-20
    assert duplicate.weight.grad is None and layer.weight.grad is not None


def test_defaults():
    """Without penalty_param, or without a manifold, cdopt's penalty is 0 in silence."""
    for options, why in (
        ({"manifold_class": stiefel_torch}, "penalty_param is 0: no penalty"),
        ({"penalty_param": 0.1}, "Linear_cdopt is CDOpt's: dissolve a plain layer"),
    ):
        layer = move_(theirs.Linear_cdopt(8, 4, **options, **F64), 3)
        assert get_quad_penalty(layer) == 0
        with pytest.raises(ValueError, match=why):
            constraints.penalty(layer)
    assert type(get_quad_penalty(nn.Linear(8, 4))) is int
