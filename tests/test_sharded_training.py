"""Constrained weights train in shards as they do in one process."""

import pytest
import shard_training_roles as roles
import torch

from cdopt_tutorial.engines import Role, launch

pytestmark = pytest.mark.xdist_group("sharded_training")

EXACT = {"SGD": 1e-12, "momentum": 1e-12, "Adam": 1e-10, "AdamW": 1e-10}


@pytest.fixture(scope="module")
def played():
    """What 4 ranks found."""
    ranks = {f"rank{i}": Role(roles.play_training, (i,)) for i in range(4)}
    return launch(ranks, deadline=240)


@pytest.mark.parametrize("case", list(roles.cases()), ids=str)
def test_trains_as_one_process_and_is_measured_and_projected_alike(played, case):
    found = [rank[case] for rank in played.values() if case in rank]
    assert len(found) == {"2": 2, "3": 3, "2 x 2": 4}[case.mesh]
    for each in found:
        assert each["parameters"] <= EXACT[case.optimizer]
        assert each["moved"] > 1e-4
        assert each["feasibility"] <= 1e-10 and each["projection"] <= 1e-10
        assert each["left"] <= 1e-12


def of_two(played, what):
    return [played[f"rank{i}"][what] for i in range(2)]


def test_a_table_cut_by_rows_or_by_columns(played):
    for found in of_two(played, "embedding"):
        assert len(found) == 2 and max(found.values()) <= 1e-12


def test_what_a_pass_has_gathered_is_measured_and_projected_in_shards(played):
    """FSDP leaves a root's weights whole after a pass, and forgets what is written."""
    for found in of_two(played, "after_evaluation"):
        assert found["before"] > 0.1 and found["feasibility"] <= 1e-12
        assert found["projection"] <= 1e-12 and found["left"] <= 1e-12
        expected = "ParametrizedLinear is gathered: give the model that is sharded"
        assert found["layer"] == expected


def test_under_fsdp_no_layer_keeps_a_weight(played):
    for found in of_two(played, "copies"):
        assert found["fsdp"] == found["fsdp per layer"] == 0
        assert found["ddp"] > 0 and found["tensor, rows last"] > 0  # till the penalty
        others = [left for way, left in found.items() if isinstance(way, tuple)]
        assert len(others) == 8 and not any(others)  # before the pass, and after all


@pytest.mark.xfail(
    torch.__version__ < (2, 13), reason="an oblique layer's is 0.08 off", strict=True
)
def test_compiled_in_shards(played):
    for found in of_two(played, "compiled"):
        assert len(found) == 2 and max(found.values()) <= 1e-12


@pytest.mark.parametrize("kind", ["Linear", "Embedding"])
@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
def test_tensor_parallel_comes_first(played, style, kind):
    order = "parallelize_module first, dissolve after it"
    for found in of_two(played, "orders"):
        expected = f"'weight' of {kind} is dissolved already: {order}"
        assert found[f"{style} {kind}"].startswith(expected)


def test_fully_shard_comes_last(played):
    expected = "Linear is under fully_shard: dissolve before, not after"
    assert all(found["fully_shard"] == expected for found in of_two(played, "orders"))
