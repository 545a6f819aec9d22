"""Distributed checkpoints of constrained models."""

import pytest
import shard_state_roles as roles
import torch
from shard_training_roles import begin

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
