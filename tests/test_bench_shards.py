"""The bench of a sharded weight: its counts are those of the arithmetic."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from cdopt_tutorial.bench import shards as bench
from cdopt_tutorial.bench import vectors
from cdopt_tutorial.engines import Role, launch, meeting
from cdopt_tutorial.engines.probes import counted

pytestmark = pytest.mark.xdist_group("bench_shards")

N, P, *_ = bench.SMOKE_SIZES[0]


@pytest.fixture(scope="module")
def smoke():
    """The rows of a smoke run, the rest, and the lines of its progress."""
    lines = []
    return *bench.measure(lines.append, True, "cpu"), lines


@pytest.fixture(scope="module")
def values(smoke):
    found = smoke[1]["values"][N].items()
    return {name.removesuffix(f", n={N}"): of for name, of in found}


def test_a_smoke_run_has_rows_of_all_variants(smoke):
    rows, more, lines = smoke
    steps, searches = [f"{name}, n={N}" for name in bench.VARIANTS], [*more["vectors"]]
    names, baselines = [], []
    for units, variants in (bench.UNITS, steps), (vectors.UNITS, searches):
        for figure in units:
            names += [f"{name}: {figure}" for name in variants]
            baselines += [f"{variants[0]}: {figure}"] * len(variants)
    assert [row.name for row in rows] == names
    assert [row.baseline for row in rows] == baselines
    turns = [line for line in lines if "svds" not in line]
    assert turns == [f"{name}, turn 1" for name in steps + searches]


def test_the_base_sends_two_sums_of_p_by_p_and_others_the_rows(values):
    sums = {bench.BASELINE: (2, 2), "pogo": (3, 2), "landing": (2, 1)}
    sums |= dict.fromkeys(("projected", "penalty", "muon"), (1, 1))
    sums["manifold-muon"] = 3, 1  # of p x p, in so many all-reduces
    for name, found in values.items():
        expected = [N // 2 * P * 4], [1]
        if name == bench.BASELINE or name in bench.IN_ROWS:
            number, times = sums[bench.IN_ROWS.get(name, name)]
            expected = [number * P * P * 4], [times]
        assert (found["bytes"], found["collectives"]) == expected, name


def test_memory_counts_the_shard_and_is_least_where_nothing_is_gathered(values):
    own = N // 2 * P * 4
    for found in values.values():
        assert found["shard and peak"][0] >= 3 * own  # A(W), or W's step, and gradients
    base = values[bench.BASELINE]["shard and peak"][0]
    assert base <= 0.6 * values["gathered"]["shard and peak"][0]


def play(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What a step of each variant changes: the weight, and its gradient if any."""
    dist.init_process_group("gloo", meeting("ranks"), rank=rank, world_size=2)
    mesh, left = init_device_mesh("cpu", (2,)), {}
    for name in bench.VARIANTS:
        step, weight = bench.make_step(name, N, P, mesh)
        before = weight.detach().full_tensor().clone()
        step()
        assert isinstance(weight, DTensor) and weight.to_local().shape == (N // 2, P)
        moved = weight.detach().full_tensor() - before
        grad = None if weight.grad is None else weight.grad.full_tensor()
        left[name] = moved, grad
    return left


def test_steps_do_what_they_are_named_for():
    left = launch({f"rank{k}": Role(play, (k,)) for k in range(2)})["rank0"]
    torch.testing.assert_close(left["sharded"][1], left["gathered"][1])
    for name, (moved, grad) in left.items():
        moves = name in ("geoopt", "muon", *bench.IN_ROWS)
        assert (grad is None) == moves == bool(moved.any()), name
        assert moves or grad.any()


def test_the_peak_is_of_what_is_allocated_at_a_time():
    kept = []

    def step():
        for _ in range(3):
            torch.empty(1000, dtype=torch.float64)
        kept.append(torch.empty(500, dtype=torch.float64))
        torch.empty(250, dtype=torch.float64)

    assert counted.peak_memory(step) == 8000
    assert counted.peak_memory(lambda: None) == 0
    assert counted.peak_memory(lambda: kept.clear()) == 0
