"""A step of a constrained weight (n, p) whose rows are shared by two ranks.

And, by ``vectors``, word vectors from the start to an accuracy.

A step maps the weight, adds the penalty and runs the backward pass, in float32 with one
thread per rank. "sharded" maps each row on its rank, and the rivals "in rows" move it
there; all others gather the weight on each rank first. For the rivals, geoopt's SGD on
the Stiefel manifold and torch's Muon, a step is the optimizer's alone, because they
have no map to differentiate. The gradient is given: no model and no batch is involved.
geoopt has the Euclidean metric: the default one makes an n x n matrix and is 40 times
slower.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import geoopt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cdopt_tutorial.bench import vectors
from cdopt_tutorial.bench.rows import Measured, Progress, Values, interleave, rows
from cdopt_tutorial.constraints.rivals import RULES, Rival
from cdopt_tutorial.constraints.surface import surface
from cdopt_tutorial.dissolving.costs import PENALTY_PARAM, Step
from cdopt_tutorial.engines import Role, launch, process_group, report
from cdopt_tutorial.engines.probes.counted import Sent, peak_memory
from cdopt_tutorial.engines.seam.device import gpus_of, wait_for

RANKS = 2
BASELINE = "sharded"
STEPS = 5  # in a turn, which reports their median
UNITS = {"step": "s", "bytes": "B/step", "collectives": "1/step", "shard and peak": "B"}

IN_ROWS = {f"{rival}, in rows": rival for rival in RULES}
VARIANTS = (BASELINE, "gathered", "geoopt", "muon", *IN_ROWS)
SIZES = (4096, 256, 9), (1024, 64, 3)  # n, p, turns
SMOKE_SIZES = ((96, 16, 1),)


def measure(progress: Progress, smoke: bool, device: str) -> Measured:
    """Time all variants in turns; in a smoke run, one turn of a small weight."""
    sizes = SMOKE_SIZES if smoke else SIZES
    roles = {f"rank{i}": Role(_measure_rank, (i, sizes, device)) for i in range(RANKS)}
    found = launch(roles, deadline=3600, on_report=lambda _, line: progress(line))
    values = found["rank0"]  # the same on both
    measured = [row for of in values.values() for row in rows(of, UNITS)]
    others, more = vectors.measure(progress, smoke)
    return measured + others, {"values": values, **more}


def _measure_rank(rank: int, sizes: Sequence, device: str) -> dict[int, Values]:
    chosen = process_group.join(rank, RANKS, gpus_of(device)).device
    mesh, values = init_device_mesh(chosen.partition(":")[0], (RANKS,)), {}
    note = report if rank == 0 else lambda _: None
    for n, p, turns in sizes:
        variants = {
            f"{name}, n={n}": partial(_figures, *make_step(name, n, p, mesh))
            for name in VARIANTS
        }
        values[n] = interleave(variants, turns, note)
    return values


def make_step(name: str, n: int, p: int, mesh: DeviceMesh) -> tuple[Step, DTensor]:
    """A variant's step, and its sharded weight; all ranks call this, and the step."""
    torch.manual_seed(0)
    gradient, start = torch.randn(n, p), nn.init.orthogonal_(torch.empty(n, p))
    start, gradient = start.to(mesh.device_type), gradient.to(mesh.device_type)
    weight = distribute_tensor(start, mesh, [Shard(0)]).requires_grad_()
    own, on = distribute_tensor(gradient, mesh, [Shard(0)]), surface("stiefel", start)
    if name in IN_ROWS:
        rival = Rival(IN_ROWS[name], {weight: surface("stiefel", weight)}, 1e-3)

    def step() -> None:
        if name in IN_ROWS:
            weight.grad = own
            rival.step()
            weight.grad = None
        elif name == BASELINE:
            _go_back(*on.map_and_distance(weight), own)
        elif name == "gathered":
            _go_back(*on.map_and_distance(weight.full_tensor()), gradient)
        else:
            _move(name, weight, gradient)

    return step, weight


def _go_back(mapped: Tensor, distance: Tensor, gradient: Tensor) -> None:
    """The backward pass of the penalty and of a loss with this gradient of A(W)."""
    torch.autograd.backward((mapped, PENALTY_PARAM * distance), (gradient, None))


@torch.no_grad()
def _move(name: str, weight: DTensor, gradient: Tensor) -> None:
    """An optimizer's step on the whole weight, of which each rank keeps its rows."""
    whole = weight.full_tensor()
    if name == "geoopt":
        manifold = geoopt.Stiefel(canonical=False)
        whole = geoopt.ManifoldParameter(whole, manifold=manifold)
        moves = geoopt.optim.RiemannianSGD([whole], lr=1e-3)
    else:
        whole = nn.Parameter(whole)
        moves = torch.optim.Muon([whole], lr=1e-3)
    whole.grad = gradient
    moves.step()
    weight.to_local().copy_(whole.chunk(RANKS)[dist.get_rank()])


def _figures(step: Step, weight: DTensor, turn: int) -> dict[str, float]:
    """Seconds of a step; in the first turn also what it sends and allocates.

    Each figure is that of the rank with the largest.
    """
    found, seconds = {}, []
    if turn == 1:  # no turn sends more than another
        step()  # which makes buffers and imports modules
        weight.grad = None
        with Sent() as sent:
            peak = peak_memory(step)
        found = {"bytes": sent.bytes, "collectives": sent.collectives}
        found["shard and peak"] = weight.to_local().nbytes + peak
    for _ in range(STEPS):
        weight.grad = None
        dist.barrier()
        began = time.perf_counter()
        step()
        wait_for(weight.device)
        seconds.append(time.perf_counter() - began)
    found["step"] = statistics.median(seconds)
    largest = torch.tensor([*found.values()], dtype=torch.float64, device=weight.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(found, largest.tolist(), strict=True))
