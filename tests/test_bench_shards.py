"""The benches of a weight in shards and of a compiled layer: they count what is so."""

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from cdopt_tutorial.bench import compiled
from cdopt_tutorial.bench import shards as bench
from cdopt_tutorial.engines import Role, launch, meeting
from cdopt_tutorial.engines.probes import counted

pytestmark = pytest.mark.xdist_group("bench_shards")

N, P = bench.SMOKE_SIZES[0].n, bench.SMOKE_SIZES[0].p


@pytest.fixture(scope="module")
def smoke():
    """The rows of a smoke run, the rest, and the lines of its progress."""
    lines = []
    return *bench.measure(lines.append, smoke=True), lines


@pytest.fixture(scope="module")
def values(smoke):
    return {name: of for name, of in smoke[1]["values"][N].items()}


def test_a_smoke_run_has_rows_of_all_variants_and_of_both_ways(smoke):
    rows, more, lines = smoke
    shards, ways = rows[:-2], rows[-2:]
    assert [row.name for row in shards] == [
        f"{name}, n={N}: {figure}" for figure in bench.UNITS for name in bench.VARIANTS
    ]
    assert {row.baseline for row in shards} == {
        f"{bench.BASELINE}, n={N}: {figure}" for figure in bench.UNITS
    }
    assert [row.name for row in ways] == [
        "eager, d=64: step", "compiled by aot_eager, d=64: step",
    ]  # fmt: skip
    assert {row.baseline for row in ways} == {"eager, d=64: step"}
    assert len(lines) == len(bench.VARIANTS) + 2
    assert lines[0] == f"n={N}: {bench.BASELINE}, turn 1"
    assert list(more["values"]) == [N] and len(more["compiled"]) == 2


def test_the_base_sends_two_sums_of_p_by_p_and_others_the_rows(values):
    for name, found in values.items():
        sums, rows = ([2 * P * P * 4], [2]), ([N // 2 * P * 4], [1])
        expected = sums if name == bench.BASELINE else rows
        assert (found["bytes"], found["collectives"]) == expected, name


def test_memory_counts_the_shard_and_is_least_where_nothing_is_gathered(values):
    own = N // 2 * P * 4
    for found in values.values():
        (peak,), (both,) = found["peak"], found["shard and peak"]
        assert both == own + peak
        assert peak >= 2 * own  # what a step gives, and what goes back
    base = values[bench.BASELINE]["shard and peak"][0]
    assert base <= 0.6 * values["gathered"]["shard and peak"][0]


def play(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What a step of each variant leaves: the weight, and the gradient if there is."""
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
        moves = name in ("geoopt", "muon")
        assert (grad is None) == moves == bool(moved.any()), name
        assert moves or grad.any()


def test_the_peak_is_of_what_is_held_at_a_time():
    kept = []

    def step():
        for _ in range(3):
            torch.empty(1000, dtype=torch.float64)
        kept.append(torch.empty(500, dtype=torch.float64))
        torch.empty(250, dtype=torch.float64)

    assert counted.peak_memory(step) == 8000
    assert counted.peak_memory(lambda: None) == 0
    assert counted.peak_memory(lambda: kept.clear()) == 0


def test_a_compiled_step_multiplies_no_more_matrices_than_an_eager_one():
    """The penalty shares the map's products, and none is of zeros."""
    numbers = []

    def count(graph, _):
        called = [n for n in graph.graph.nodes if n.op == "call_function"]
        numbers.append(sum("mm" in str(node.target) for node in called))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    _, step = compiled.make_steps(16, backend).values()
    step()
    assert numbers == [3, 4]  # the layer's own is one of each


def test_both_ways_give_the_same_gradient():
    steps = compiled.make_steps(16, "aot_eager")
    grads = []
    for step in steps.values():
        step()
        cells = step.func.__closure__
        layer = next(c.cell_contents for c in cells if hasattr(c.cell_contents, "bias"))
        weight = layer.parametrizations.weight.original
        grads.append(weight.grad.clone())
    torch.testing.assert_close(*grads)
    assert grads[0].any()
