"""Distributed checkpoints of constrained models, and what a free model has of them."""

import pytest
import shard_state_roles as roles
import torch
from shard_training_roles import Block, batch, begin
from torch import nn

from cdopt_tutorial import constraints
from cdopt_tutorial.engines import Role, launch

pytestmark = pytest.mark.xdist_group("sharded_states")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks leave their checkpoints."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def played(folder):
    """What 4 ranks found."""
    if torch.__version__ < (2, 13):
        pytest.skip("FSDP adds wrongly to a penalty's gradient that is cut by columns")
    ranks = {f"rank{i}": Role(roles.play_states, (i, folder)) for i in range(4)}
    return launch(ranks, deadline=120)


@pytest.fixture(scope="module")
def loaded(played):
    """What those found who loaded."""
    return [played[f"rank{i}"] for i in (1, 2, 3)]


@pytest.mark.parametrize("saved", ["2", "2 x 2"])
def test_others_go_on_from_a_checkpoint(loaded, saved):
    assert max(found[saved] for found in loaded) <= 1e-10


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it should be
@pytest.mark.parametrize("saved", ["2", "2 x 2"])
def test_one_process_goes_on_from_a_checkpoint(played, folder, saved):
    ours = roles.gone_on(folder / saved, begin("stiefel"))
    theirs = roles.parameters(roles.expected())
    assert roles.furthest(ours, theirs) <= 1e-10
    assert roles.furthest(ours, roles.parameters(begin("stiefel"))) > 0.01


def test_a_free_model_takes_over_and_gives_back(loaded):
    for found in loaded:
        assert found["free"] <= 1e-12
        assert found["back"] <= 1e-12 and found["back, plain"] <= 1e-12
        assert found["left"] <= 1e-12 and found["placed"]


class TestFreeStates:
    @pytest.mark.parametrize("manifold", constraints.MANIFOLDS)
    def test_a_free_model_computes_as_the_constrained_one(self, manifold):
        held, free, x = begin(manifold), Block(), batch(0)[0]
        free.load_state_dict(constraints.free_state_dict(held))
        torch.testing.assert_close(free(x), held(x), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("manifold", constraints.MANIFOLDS)
    def test_back_from_it_is_the_nearest(self, manifold):
        held, again = begin(manifold), begin(manifold)
        constraints.load_free_state_dict(again, constraints.free_state_dict(held))
        constraints.project_(held)
        ours, theirs = roles.parameters(again), roles.parameters(held)
        assert roles.furthest(ours, theirs) <= 1e-12

    def test_recurrent_layers_and_what_is_shared(self):
        rnn = constraints.dissolve_recurrent(nn.LSTM(3, 4), per_gate=True)
        model, free = nn.Sequential(rnn, rnn), nn.LSTM(3, 4)
        free = nn.Sequential(free, free)
        free.load_state_dict(constraints.free_state_dict(model))
        x = torch.randn(5, 2, 3)
        torch.testing.assert_close(free[0](x)[0], rnn(x)[0])
        before = rnn.weight_hh_l0.detach().clone()
        constraints.load_free_state_dict(model, free.state_dict())
        torch.testing.assert_close(rnn.weight_hh_l0, before)

    def test_what_does_not_fit_is_refused(self):
        held = constraints.dissolve(nn.Linear(4, 3))
        with pytest.raises(RuntimeError, match="Unexpected key.*wait"):
            state = {**constraints.free_state_dict(held), "wait": torch.ones(1)}
            constraints.load_free_state_dict(held, state)
        with pytest.raises(RuntimeError, match="Missing key"):
            constraints.load_free_state_dict(held, {"bias": torch.ones(3)})
        held = constraints.dissolve(nn.Linear(4, 3), manifold="sphere")
        with pytest.raises(ValueError, match="weight: no projection of a weight of"):
            state = {"weight": torch.zeros(3, 4), "bias": torch.ones(3)}
            constraints.load_free_state_dict(held, state)
