"""A step of a constrained weight (n, p) that two ranks hold the rows of.

And, by ``vectors``, word vectors from the start to an accuracy.

A step maps the weight, adds a penalty and goes back, in float32, one thread a rank.
"sharded" maps the rows where they lie, and the rivals "in rows" move them there; all
others gather the weight on each rank first. Of rivals, of geoopt's SGD on the Stiefel
manifold, and of torch's Muon, it is the optimizer's step alone, for there is no map to
go back through. The gradient of what a rank uses is given: nothing is summed over
batches.

torch's parametrizations take seconds to minutes at the full size, so they have smaller
ones, and base rows of their own. geoopt's metric is the Euclidean one: its default
makes an n x n matrix, and is 40 times slower.
"""

import statistics
import time
from functools import partial

import geoopt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import parametrizations

from cdopt_tutorial.bench import vectors
from cdopt_tutorial.bench.rows import Measured, Progress, Values, interleave, rows
from cdopt_tutorial.constraints.rivals import RULES, Rival
from cdopt_tutorial.constraints.surface import surface
from cdopt_tutorial.dissolving.costs import EXACT, PENALTY_PARAM, Step
from cdopt_tutorial.engines import Role, launch, process_group, report
from cdopt_tutorial.engines.probes.counted import Sent, peak_memory
from cdopt_tutorial.engines.seam.device import gpus_of, wait_for

RANKS = 2
BASELINE = "sharded"
STEPS = 5  # of a turn, whose median counts
UNITS = {"step": "s", "bytes": "B/step", "collectives": "1/step"}
UNITS |= dict.fromkeys(("peak", "shard and peak"), "B")


IN_ROWS = {f"{rival}, in rows": rival for rival in RULES}
VARIANTS = (BASELINE, "gathered", "geoopt", "muon", *IN_ROWS, *EXACT)
Sizes = tuple[tuple[int, int, tuple[str, ...], int], ...]  # n, p, variants, turns
SIZES: Sizes = (
    (4096, 256, tuple(name for name in VARIANTS if name not in EXACT), 9),
    (2048, 128, (BASELINE, "gathered", "cayley", "householder"), 3),
    (1024, 64, (BASELINE, "gathered", "matrix_exp"), 3),
)
SMOKE_SIZES: Sizes = ((96, 16, VARIANTS, 1),)


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants in turns; in a smoke run, one turn of small ones."""
    sizes = SMOKE_SIZES if smoke else SIZES
    roles = {f"rank{i}": Role(_measure_rank, (i, sizes, device)) for i in range(RANKS)}
    found = launch(roles, deadline=3600, on_report=lambda _, line: progress(line))
    measured, values = [], found["rank0"]  # of the slowest, or largest, rank
    for n, of in values.items():
        measured += rows(of, UNITS, f"{BASELINE}, n={n}")
    others, more = vectors.measure(progress, smoke)
    return measured + others, {"values": values, **more}


def _measure_rank(rank: int, sizes: Sizes, device: str) -> dict[int, Values]:
    chosen = process_group.join(rank, RANKS, gpus_of(device)).device
    mesh, values = init_device_mesh(chosen.partition(":")[0], (RANKS,)), {}
    tell = report if rank == 0 else lambda _: None
    for n, p, names, turns in sizes:
        variants = {
            f"{name}, n={n}": partial(_figures, name, *make_step(name, n, p, mesh))
            for name in names
        }
        values[n] = interleave(variants, turns, tell)
    return values


def make_step(name: str, n: int, p: int, mesh: DeviceMesh) -> tuple[Step, DTensor]:
    """A variant's step, and its weight in shards; all ranks call both."""
    torch.manual_seed(0)
    gradient, layer = torch.randn(n, p), nn.Linear(p, n, bias=False)
    start = nn.init.orthogonal_(layer.weight).detach()
    if name in EXACT:
        parametrizations.orthogonal(layer, orthogonal_map=name)
        (rule,) = layer.to(mesh.device_type).parametrizations.weight
        start = layer.parametrizations.weight.original.detach()
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
        elif name in EXACT:
            rule(weight.full_tensor()).backward(gradient)
        else:
            _move(name, weight, gradient)

    return step, weight


def _go_back(mapped: Tensor, distance: Tensor, gradient: Tensor) -> None:
    """From the penalty, and from a loss with this gradient of A(W)."""
    torch.autograd.backward((mapped, PENALTY_PARAM * distance), (gradient, None))


@torch.no_grad()
def _move(name: str, weight: DTensor, gradient: Tensor) -> None:
    """An optimizer's step on the whole weight, of which a rank keeps its rows."""
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


def _figures(name: str, step: Step, weight: DTensor, turn: int) -> dict[str, float]:
    """The time of a step; in the first turn also what it sends and allocates.

    Of the slowest rank at each step, and of the one that sends, or holds, most.
    """
    found, seconds = {}, []
    if turn == 1:  # no turn sends more than another
        step()  # buffers are made, modules imported
        weight.grad = None
        with Sent() as sent:
            peak = peak_memory(step)
        found = {"bytes": sent.bytes, "collectives": sent.collectives, "peak": peak}
        found["shard and peak"] = peak + weight.to_local().nbytes
    for _ in range(1 if name in EXACT else STEPS):
        weight.grad = None
        dist.barrier()
        began = time.perf_counter()
        step()
        wait_for(weight.device)
        seconds.append(time.perf_counter() - began)
    of_all = torch.tensor([*seconds, *found.values()], dtype=torch.float64)
    of_all = of_all.to(weight.device)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    steps, counts = of_all.tolist()[: len(seconds)], of_all.tolist()[len(seconds) :]
    return {"step": statistics.median(steps)} | dict(zip(found, counts, strict=True))
