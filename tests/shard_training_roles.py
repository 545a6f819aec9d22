"""Roles for the tests of training in shards; they must be importable by workers."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import shard_roles
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shard_roles import F64, RANKS, off, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints.layers import Dissolved
from cdopt_tutorial.hybrid.replicas import join

STEPS, BATCH, WIDTH, HIDDEN = 4, 12, 6, 18
OPTIMIZERS: dict[str, Callable] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
}


class Block(nn.Module):
    """A tall weight of square blocks, a wide one, and one of 7 rows, cut unevenly."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, **F64)
        self.down = nn.Linear(HIDDEN, WIDTH, **F64)
        self.last = nn.Linear(WIDTH, WIDTH + 1, **F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(torch.tanh(self.up(x))))


#: Of each layer, where they are not all on one.
MIXED = {"up": "oblique", "down": "oblique", "last": "sphere"}


def hold_(model: Block, manifold: str) -> Block:
    for name, layer in model.named_children():
        on = MIXED[name] if manifold == "mixed" else manifold
        # The tall weight is of three square blocks; a sphere takes none.
        blocks = 3 if name == "up" and on != "sphere" else 1
        constraints.dissolve(layer, manifold=on, blocks=blocks)
    return model


def begin(manifold: str) -> Block:
    """The same on every rank, a little off the manifolds."""
    torch.manual_seed(0)
    model = hold_(Block(), manifold)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = shard_roles.drawn((BATCH, 2 * WIDTH + 1), step).split((WIDTH, WIDTH + 1), 1)
    return x.contiguous(), y.contiguous()  # older stages refuse a view


@dataclass
class Loop:
    """A few steps, the same for one process and for a rank of several."""

    optimizer: str = "SGD"
    clip: float | None = None
    micro: int = 1  #: batches whose gradients are added up to one step
    parts: int = 1  #: into how many parts a batch is cut
    part: int = 0  #: and which this rank has
    held: bool = True
    fresh: bool = False  #: whether the penalty is asked of the model after the pass

    def __call__(self, model: nn.Module) -> nn.Module:
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        held = constraints.Constraints(model) if self.held else None
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(self.micro):
                if self.micro > 1 and isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(number == self.micro - 1)
                x, y = (self.mine(each, number) for each in batch(step))
                loss = F.mse_loss(model(x).double(), y)
                if held:
                    now = constraints.penalty(model) if self.fresh else held.penalty()
                    loss = loss + now
                (loss / self.micro).backward()
            if self.clip:
                clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
        return model

    def mine(self, joint: Tensor, number: int) -> Tensor:
        return joint.chunk(self.micro)[number].chunk(self.parts)[self.part]


def alone(manifold: str, **options: Any) -> Block:
    """What one process has in the end."""
    return copy.deepcopy(_alone(manifold, tuple(options.items())))


@functools.cache
def _alone(manifold: str, options: tuple) -> Block:
    return Loop(**dict(options))(begin(manifold))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: whole(p).detach() for name, p in model.named_parameters()}


@torch.no_grad()
def begin_at_(model: nn.Module, start: nn.Module) -> nn.Module:
    """Put another's weights in, as they are: to assign them would project them."""
    values = parameters(start)
    for name, parameter in model.named_parameters():
        value = values[name]
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value, mesh, placements)
        parameter.copy_(value)
    return model


# The ways to distribute a model; each gives it, its number of batches and its own.


def by_ddp(mesh: DeviceMesh, start: Block) -> tuple[nn.Module, int, int]:
    model = DistributedDataParallel(start, process_group=mesh.get_group())
    return model, mesh.size(), mesh.get_local_rank()


def by_fsdp(mesh: DeviceMesh, start: Block, layers=(), **options) -> tuple:
    for name in layers:
        fully_shard(start.get_submodule(name), mesh=mesh, **options)
    fully_shard(start, mesh=mesh, **options)
    return start, mesh.size(), mesh.get_local_rank()


def by_tensor(mesh: DeviceMesh, start: Block, manifold: str, **last) -> tuple:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), **last}
    model = parallelize_module(Block(), mesh, plan)
    return begin_at_(hold_(model, manifold), start), 1, 0


def by_both(mesh: DeviceMesh, start: Block, manifold: str) -> tuple:
    model, *_ = by_tensor(mesh["tp"], start, manifold, **BY_ROWS)
    return by_fsdp(mesh["dp"], model, LAYERS)


LAYERS = ("up", "down", "last")
BY_COLUMNS = {"last": ColwiseParallel(output_layouts=Replicate())}
BY_ROWS = {"last": RowwiseParallel(input_layouts=Replicate())}
WAYS: dict[str, Callable[[DeviceMesh, Block, str], tuple]] = {
    "ddp": lambda mesh, start, manifold: by_ddp(mesh, start),
    "fsdp": lambda mesh, start, manifold: by_fsdp(mesh, start),
    "fsdp per layer": lambda mesh, start, manifold: by_fsdp(mesh, start, LAYERS),
    "fsdp by columns": lambda mesh, start, manifold: by_fsdp(
        mesh, start, shard_placement_fn=lambda p: Shard(p.ndim - 1)
    ),
    "tensor, columns last": lambda *given: by_tensor(*given, **BY_COLUMNS),
    "tensor, rows last": lambda *given: by_tensor(*given, **BY_ROWS),
    "fsdp and tensor": by_both,
}


@dataclass(frozen=True)
class Case:
    """A run in shards to be compared with that of one process."""

    way: str
    mesh: str
    manifold: str = "stiefel"
    optimizer: str = "SGD"
    options: tuple = ()  #: of the loop, as pairs

    def __call__(self, mesh: DeviceMesh) -> dict[str, float]:
        options = {"optimizer": self.optimizer, **dict(self.options)}
        start, expected = begin(self.manifold), alone(self.manifold, **options)
        model, parts, part = WAYS[self.way](mesh, start, self.manifold)
        Loop(**options, parts=parts, part=part)(model)
        return compared(model, expected, self.manifold)


def compared(model: nn.Module, expected: Block, manifold: str) -> dict[str, float]:
    """The differences of parameters and feasibilities; what a projection leaves."""
    ours, theirs, before = map(parameters, (model, expected, begin(manifold)))
    assert ours.keys() == theirs.keys()
    found = {"parameters": max(off(ours[name], theirs[name]) for name in theirs)}
    found["moved"] = min(off(ours[name], before[name]) for name in theirs)
    one, other = constraints.feasibility(model), constraints.feasibility(expected)
    found["feasibility"] = abs(one.weight - other.weight) + abs(
        one.mapped - other.mapped
    )
    for each in model, expected:
        constraints.project_(each)
    ours, theirs = parameters(model), parameters(expected)
    found["projection"] = max(off(ours[name], theirs[name]) for name in theirs)
    return found | {"left": constraints.feasibility(model).weight}


def cases() -> Iterator[Case]:
    """All that this torch can do: each way, and what else matters to some of them."""
    ways = dict(WAYS)
    if torch.__version__ < (2, 13):
        # A penalty leaves a gradient; to one cut by columns older FSDP adds what is
        # whole.
        del ways["fsdp by columns"], ways["fsdp and tensor"]
    for number, way in enumerate(ways):
        mesh = "2 x 2" if way == "fsdp and tensor" else "23"[number % 2]
        yield Case(way, mesh)
        if way not in ("ddp", "fsdp per layer"):
            yield Case(way, mesh, "mixed", "Adam")
    clip, micro, fresh = (("clip", 0.05),), (("micro", 2),), (("fresh", True),)
    yield Case("fsdp", "2", optimizer="momentum", options=clip)
    yield Case("tensor, rows last", "3", optimizer="AdamW", options=clip)
    yield Case("fsdp per layer", "2", options=micro)
    yield Case("fsdp per layer", "2", options=fresh)
    if "fsdp and tensor" in ways:
        yield Case("fsdp and tensor", "2 x 2", options=clip + micro)


# What follows runs on the ranks of the tests of training.


def play_training(rank: int) -> dict:
    """What each case found."""
    join(rank, RANKS, ())
    there = shard_roles.meshes()
    found: dict = {}
    for case in cases():
        if there[case.mesh].get_coordinate() is not None:
            found[case] = case(there[case.mesh])
    if rank < 2:
        for play in OF_TWO:
            found[play.__name__] = play(there["2"])
    dist.barrier()
    return found


def after_evaluation(mesh: DeviceMesh) -> dict[str, Any]:
    """A model that is whole on each rank since a pass is measured and projected."""
    model, expected = by_fsdp(mesh, begin("stiefel"))[0], begin("stiefel")
    with torch.no_grad():
        model(batch(0)[0])
    found: dict = {"layer": told(constraints.project_, model.up)}
    one, other = constraints.feasibility(model), constraints.feasibility(expected)
    with torch.no_grad():
        model(batch(0)[0])
    constraints.project_(model)
    constraints.project_(expected)
    model.reshard()
    ours, theirs = parameters(model), parameters(expected)
    return found | {
        "feasibility": abs(one.weight - other.weight),
        "before": one.weight,
        "projection": max(off(ours[name], theirs[name]) for name in theirs),
        "left": constraints.feasibility(model).weight,
    }


def embedding(mesh: DeviceMesh) -> dict[str, float]:
    """A table cut by rows or by columns: the gradients' difference from one process."""
    found, words = {}, torch.arange(9)
    for style in (
        RowwiseParallel(input_layouts=Replicate()),
        ColwiseParallel(output_layouts=Replicate()),
    ):
        tables = [nn.Embedding(9, 4, **F64) for _ in range(2)]
        parallelize_module(tables[0], mesh, style)
        for table in tables:
            constraints.dissolve(table)
        begin_at_(tables[0], tables[1])
        for table in tables:
            with torch.no_grad():
                table.parametrizations.weight.original.mul_(1.1)
            loss = (table(words) * shard_roles.drawn((9, 4), 0)).square().sum()
            (loss + constraints.penalty(table)).backward()
        ours, theirs = (whole(next(each.parameters()).grad) for each in tables)
        found[type(style).__name__] = off(ours, theirs)
    return found


def copies(mesh: DeviceMesh) -> dict[str, int]:
    """What dissolved layers keep between a pass and its penalty, under each way."""
    found = {}
    for way in "ddp", "fsdp", "fsdp per layer", "tensor, rows last":
        model, parts, part = WAYS[way](mesh, begin("stiefel"), "stiefel")
        found[way, "before"] = sum(len(each._seen) for each in dissolved(model))
        loss = model(batch(0)[0].chunk(parts)[part]).sum()
        found[way] = sum(len(each._seen) for each in dissolved(model))
        (loss + constraints.penalty(model)).backward()
        found[way, "after"] = sum(len(each._seen) for each in dissolved(model))
    return found


def dissolved(model: nn.Module) -> list[Dissolved]:
    return [each for each in model.modules() if isinstance(each, Dissolved)]


def compiled(mesh: DeviceMesh) -> dict[tuple[str, str], float]:
    """How far a compiled layer in shards is from itself; in one graph but for FSDP.

    Torch breaks the graph there itself, at the hooks that gather the weights.
    """
    found, (x, _) = {}, batch(0)
    for way, manifold in ("fsdp", "stiefel"), ("tensor, columns last", "oblique"):
        model, *_ = WAYS[way](mesh, begin(manifold), manifold)
        held, gradients = constraints.Constraints(model), []

        def loss(x: Tensor, model=model, held=held) -> Tensor:
            return model(x).square().mean() + held.penalty()

        whole_graph = way != "fsdp"
        compiled = torch.compile(loss, fullgraph=whole_graph, backend="aot_eager")
        for each in loss, compiled:
            model.zero_grad()
            each(x).backward()
            gradients.append([whole(p.grad) for p in model.parameters()])
        found[way, manifold] = max(map(off, *gradients))
        torch._dynamo.reset()
    return found


def orders(mesh: DeviceMesh) -> dict[str, str]:
    """What the wrong orders are told."""
    found = {}
    for kind, style in itertools.product(
        (nn.Linear, nn.Embedding), (ColwiseParallel, RowwiseParallel)
    ):
        layer = constraints.dissolve(kind(8, 4, **F64))
        name = f"{style.__name__} {kind.__name__}"
        found[name] = told(parallelize_module, layer, mesh, style())
        assert not any(isinstance(each, DTensor) for each in layer.parameters())
    model = fully_shard(nn.Sequential(nn.Linear(4, 4, **F64)), mesh=mesh)
    found["fully_shard"] = told(constraints.dissolve, model[0])
    return found


def told(action: Callable[..., Any], *args: Any) -> str:
    try:
        action(*args)
    except ValueError as error:
        return str(error)
    return ""


OF_TWO = embedding, after_evaluation, copies, compiled, orders
