"""CDOpt's own layers in shards: what works, what torch refuses, and the way out."""

import pytest
import shard_cdopt_roles as roles

from cdopt_tutorial.engines import Role, launch

pytestmark = pytest.mark.xdist_group("sharded_cdopt")

each_case = pytest.mark.parametrize(("kind", "manifold"), list(roles.cases()))


@pytest.fixture(scope="module")
def played():
    """What 2 ranks found."""
    ranks = {f"rank{i}": Role(roles.play_cdopt, (i,)) for i in range(2)}
    return launch(ranks, deadline=120).values()


@each_case
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_trains_as_one_process(played, way, kind, manifold):
    for rank in played:
        found = rank[way, kind, manifold]
        assert found["parameters"] <= 1e-12 and found["feasibility"] <= 1e-12
        assert found["before"] > 0.01 and found["left"] <= 1e-12
        assert found["projection"] <= 1e-12


@each_case
def test_tensor_parallel_refuses_them(played, kind, manifold):
    expected = {
        "Linear_cdopt": "NotImplementedError: ColwiseParallel currently only support",
        "set_constraint_dissolving": "KeyError: 'parameter name can\\'t contain",
    }
    for rank in played:
        assert rank["refused", kind, manifold].startswith(expected[kind])


@each_case
def test_the_way_out_is_a_plain_layer_that_is_dissolved(played, kind, manifold):
    assert all(rank["way out", kind, manifold] <= 1e-12 for rank in played)
