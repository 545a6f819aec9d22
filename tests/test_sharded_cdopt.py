"""CDOpt's own layers in shards: what works, what torch refuses, and the way out."""

import pytest
import shard_cdopt_roles as roles

from cdopt_tutorial.engines import Role, launch

pytestmark = pytest.mark.xdist_group("sharded_cdopt")

each_case = pytest.mark.parametrize(("kind", "manifold"), list(roles.cases()))


@pytest.fixture(scope="module")
def played():
    """What 2 of 4 ranks found."""
    ranks = {f"rank{i}": Role(roles.play_cdopt, (i,)) for i in range(4)}
    found = launch(ranks, deadline=120)
    return [found["rank0"], found["rank1"]]


@each_case
@pytest.mark.parametrize("penalty", roles.PENALTIES)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_trains_as_one_process(played, way, kind, manifold, penalty):
    """Under FSDP if its weights are made contiguous first."""
    for rank in played:
        found = rank[way, kind, manifold, penalty]
        assert found["parameters"] <= 1e-12 and found["feasibility"] <= 1e-12
        assert found["before"] > 0.01 and found["left"] <= 1e-12
        assert found["projection"] <= 1e-12


@each_case
def test_fully_shard_refuses_the_weights_that_cdopt_has_turned(played, kind, manifold):
    for rank in played:
        found = rank["refused", kind, manifold]
        expected = "NotImplementedError: FSDP does not support non-contiguous"
        assert found["fsdp"].startswith(expected) == found["turned"]


def test_some_are_turned(played):
    for rank in played:
        turned = [rank["refused", *case]["turned"] for case in roles.cases()]
        assert any(turned) and not all(turned)


@each_case
def test_tensor_parallel_refuses_them(played, kind, manifold):
    expected = {
        "Linear_cdopt": "NotImplementedError: ColwiseParallel currently only support",
        "set_constraint_dissolving": "KeyError: 'parameter name can\\'t contain",
    }
    for rank in played:
        assert rank["refused", kind, manifold]["tensor"].startswith(expected[kind])


@each_case
def test_the_way_out_is_a_plain_layer_that_is_dissolved(played, kind, manifold):
    assert all(rank["way out", kind, manifold] <= 1e-12 for rank in played)
