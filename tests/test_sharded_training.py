"""Constrained weights train in shards as in one process."""

import pytest
import shard_training_roles as roles
from shard_training_roles import CASES

from cdopt_tutorial.run import Role, launch

pytestmark = pytest.mark.xdist_group("sharded_training")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks leave their checkpoints."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def played(folder):
    """The results of 4 ranks."""
    ranks = {f"rank{i}": Role(roles.play_training, (i, folder)) for i in range(4)}
    return launch(ranks, deadline=240)


@pytest.fixture
def of_two(played):
    """The results of the first two ranks, by the name of a comparison."""
    return lambda what: [played[f"rank{i}"][what] for i in range(2)]


def assert_equal(found):
    assert found["parameters"] <= 1e-10 and found["moved"] > 1e-4
    assert found.get("export", 0.0) <= 1e-10
    assert found["feasibility"] <= 1e-10 and found["projection"] <= 1e-10
    assert found["left"] <= 1e-12


def named(case):
    way, mesh, manifold = case
    return f"{way.__name__} on {mesh}, {manifold}"


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(named, CASES))
def test_trains_as_one_process_and_is_measured_and_projected_alike(played, number):
    _, mesh, _ = CASES[number]
    found = [rank[number] for rank in played.values() if number in rank]
    assert len(found) == {"2": 2, "3": 3, "2 x 2": 4}[mesh]
    for each in found:
        assert_equal(each)


@pytest.mark.skipif(roles.OLD, reason="FSDP adds wrongly to a penalty's gradient")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it should be
def test_three_ranks_and_one_process_go_on_from_a_checkpoint(played, folder):
    found = [played[f"rank{i}"]["checkpoint"] for i in (1, 2, 3)]
    for each in *found, roles.gone_on(folder, roles.begin()):
        assert_equal(each)


@pytest.mark.parametrize("what", ["embedding", "compiled"])
def test_a_table_cut_by_rows_or_by_columns_and_a_compiled_model(of_two, what):
    for found in of_two(what):
        assert max(found.values()) <= 1e-12


def test_what_a_pass_has_gathered_is_measured_and_projected_in_shards(of_two):
    """After a pass FSDP leaves a root's weights whole, and drops writes to them."""
    for found in of_two("after_evaluation"):
        assert found["before"] > 0.1 and found["feasibility"] <= 1e-12
        assert found["projection"] <= 1e-12 and found["left"] <= 1e-12
        assert found["layer"].startswith("weight is gathered by FSDP: give the model")


def test_bfloat16_rounds_the_gradient_but_not_the_penalty(of_two):
    for found in of_two("half"):
        assert 2**-9 < found["gradient"] < 2**-5 and found["penalty"] < 1e-6


def test_a_wrong_order_raises_an_error(of_two):
    cut = "'weight' has to be dissolved, and not cut yet"
    for found in of_two("orders"):
        assert 'contain "."' in found.pop("parallelize_module")  # torch's own
        under = "Linear is under fully_shard: dissolve before, not after"
        assert found == {"fully_shard": under, "free": cut, "twice": cut}
