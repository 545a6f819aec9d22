"""Roles for the tests of training in shards; they must be importable by workers."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from constrained import F64, drawn, move_
from shard_roles import RANKS, error_of, meshes, off
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrize import remove_parametrizations

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints.sharded import map_before_gathering
from cdopt_tutorial.constraints.sums import placed, whole
from cdopt_tutorial.constraints.weights import constrained
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.run.process_group import join

STEPS, BATCH, WIDTH, HIDDEN = 4, 12, 6, 18
OPTIMIZERS: dict[str, Callable] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
}
#: Older FSDP adds the whole gradient to the penalty's, which is cut by columns.
OLD = torch.__version__ < (2, 13)


class Block(nn.Module):
    """A tall weight of square blocks, a wide one, and one of 7 rows, cut unevenly."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, **F64)
        self.down = nn.Linear(HIDDEN, WIDTH, **F64)
        self.last = nn.Linear(WIDTH, WIDTH + 1, **F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(torch.tanh(self.up(x))))


LAYERS = ("up", "down", "last")
#: The manifold of each layer, where they differ.
MIXED = {"up": "oblique", "down": "oblique", "last": "sphere"}


def dissolve_(model: Block, manifold: str) -> Block:
    for name, layer in model.named_children():
        on = MIXED[name] if manifold == "mixed" else manifold
        # The tall weight has three square blocks; a sphere takes none.
        blocks = 3 if name == "up" and on != "sphere" else 1
        constraints.dissolve(layer, manifold=on, blocks=blocks)
    return model


@torch.no_grad()
def begin(manifold: str) -> Block:
    """The same on every rank, a little off the manifolds."""
    torch.manual_seed(0)
    model = dissolve_(Block(), manifold)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = drawn((BATCH, 2 * WIDTH + 1), step).split((WIDTH, WIDTH + 1), 1)
    return x.contiguous(), y.contiguous()  # older stages refuse a view


@dataclass(frozen=True)
class Loop:
    """A few steps, the same for one process and for a rank of several."""

    optimizer: str = "SGD"
    clip: float | None = None
    micro: int = 1  #: batches whose gradients are summed for a step
    parts: int = 1  #: how many parts a batch is cut into
    part: int = 0  #: the one that this rank has

    def __call__(
        self, model: nn.Module, optimizer: Any = None, steps: range = range(STEPS)
    ) -> nn.Module:
        if optimizer is None:
            groups = undecayed(model) if self.optimizer == "AdamW" else None
            optimizer = OPTIMIZERS[self.optimizer](groups or model.parameters())
        penalty = constraints.Constraints(model).penalty
        for step in steps:
            optimizer.zero_grad()
            for number in range(self.micro):
                if self.micro > 1 and isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(number == self.micro - 1)
                x, y = (self.mine(each, number) for each in batch(step))
                loss = F.mse_loss(model(x).double(), y)
                ((loss + penalty()) / self.micro).backward()
            if self.clip:
                clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
        return model

    def mine(self, joint: Tensor, number: int) -> Tensor:
        return joint.chunk(self.micro)[number].chunk(self.parts)[self.part]


def undecayed(model: nn.Module) -> list[dict]:
    """A model's parameters, with no weight decay on the constrained ones."""
    weights = [weight for weight, _ in constrained({"": model}).values()]
    free = [p for p in model.parameters() if p not in set(weights)]
    return [{"params": weights, "weight_decay": 0.0}, {"params": free}]


def alone(manifold: str, loop: Loop) -> nn.Module:
    """The model that one process has trained."""
    return loop(begin(manifold))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The trained ones, whole."""
    return {name: whole(p).detach() for name, p in model.named_parameters()}


# Ways to distribute a model; each returns it, the number of data shards, and its own.


def by_fsdp(mesh: DeviceMesh, start: nn.Module, manifold: str, layers=(), **options):
    for name in layers:
        fully_shard(start.get_submodule(name), mesh=mesh, **options)
    fully_shard(start, mesh=mesh, **options)
    return start, mesh.size(), mesh.get_local_rank()


@torch.no_grad()
def by_tensor(mesh: DeviceMesh, start: Block, manifold: str) -> tuple:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "last": BY_ROWS}
    model = dissolve_(parallelize_module(Block(), mesh, plan), manifold)
    values = parameters(start)
    for name, parameter in model.named_parameters():
        # By a copy, because an assignment would project the weight.
        parameter.copy_(placed(values[name], parameter))
    return model, 1, 0


def by_both(mesh: DeviceMesh, start: Block, manifold: str) -> tuple:
    model, *_ = by_tensor(mesh["tp"], start, manifold)
    return by_fsdp(mesh["dp"], model, manifold, LAYERS)


def by_checkpoints(mesh: DeviceMesh, start: Block, manifold: str) -> tuple:
    for name in LAYERS:
        checkpoint(start.get_submodule(name))  # recomputed in the backward pass
    return by_fsdp(mesh, start, manifold, LAYERS)


def by_mapping_first(mesh: DeviceMesh, start: Block, manifold: str) -> tuple:
    ignored = [map_before_gathering(layer, mesh) for layer in start.children()]
    return by_fsdp(mesh, start, manifold, LAYERS, ignored_params=set().union(*ignored))


@torch.no_grad()
def from_meta(mesh: DeviceMesh, start: Block, manifold: str) -> tuple:
    with torch.device("meta"):
        model = dissolve_(Block(), manifold)
    values, found = parameters(start), by_fsdp(mesh, model, manifold, LAYERS)
    for name, parameter in model.to_empty(device="cpu").named_parameters():
        parameter.copy_(placed(values[name], parameter))
    return found


BY_COLUMNS = ColwiseParallel(output_layouts=Replicate())
BY_ROWS = RowwiseParallel(input_layouts=Replicate())
WAYS: dict[str, Callable[[DeviceMesh, nn.Module, str], tuple]] = {
    "fsdp": by_fsdp,
    "fsdp per layer": functools.partial(by_fsdp, layers=LAYERS),
    "tensor": by_tensor,
    "fsdp and tensor": by_both,
    "fsdp, checkpointed": by_checkpoints,
    "fsdp from meta": from_meta,
    "fsdp, mapped first": by_mapping_first,
}


@dataclass(frozen=True)
class Case:
    """A run in shards, to be compared with one process."""

    way: str
    mesh: str
    manifold: str = "stiefel"
    loop: Loop = Loop()

    def __call__(self, mesh: DeviceMesh) -> dict[str, float]:
        model, parts, part = WAYS[self.way](mesh, begin(self.manifold), self.manifold)
        replace(self.loop, parts=parts, part=part)(model)
        expected = alone(self.manifold, self.loop)
        found = {}
        if isinstance(model, FSDPModule) and self.manifold == "stiefel":
            x, _ = batch(0)
            found["export"] = off(exported(model)(x), expected(x))
        return found | compared(model, expected, begin(self.manifold))


def exported(model: nn.Module) -> Block:
    """A plain model with the whole mapped weights; all ranks have a copy."""
    whole_ones = StateDictOptions(full_state_dict=True)
    plain, dissolved = Block(), dissolve_(Block(), "stiefel")
    dissolved.load_state_dict(get_model_state_dict(model, options=whole_ones))
    for layer in dissolved.children():
        remove_parametrizations(layer, "weight")
    plain.load_state_dict(dissolved.state_dict())
    return plain


def compared(model: nn.Module, expected: nn.Module, start: nn.Module) -> dict:
    """Differences of parameters and feasibilities, and what a projection leaves."""
    ours, before = parameters(model), parameters(start)
    found = {"parameters": max_difference(ours, parameters(expected))}
    found["moved"] = min(off(ours[name], before[name]) for name in before)
    one, other = constraints.feasibility(model), constraints.feasibility(expected)
    pairs = (one.weight, other.weight), (one.mapped, other.mapped)
    found["feasibility"] = max(abs(our - their) for our, their in pairs)
    for each in model, expected:
        constraints.project_(each)
    found["projection"] = max_difference(parameters(model), parameters(expected))
    return found | {"left": constraints.feasibility(model).weight}


def cases() -> Iterator[Case]:
    """Each way, and options that matter to some of them, as far as this torch can."""
    for way, mesh in ("fsdp", "3"), ("tensor", "2"), ("fsdp and tensor", "2 x 2"):
        if not (OLD and mesh == "2 x 2"):
            yield Case(way, mesh, "mixed", Loop("Adam"))
            yield Case(way, mesh)
    yield Case("fsdp", "2", loop=Loop("momentum", clip=0.05))
    yield Case("fsdp per layer", "3", loop=Loop(clip=0.05, micro=2))
    for way in "fsdp, checkpointed", "fsdp from meta":
        yield Case(way, "3", loop=Loop("AdamW", micro=2))
    yield Case("fsdp, mapped first", "2", "stiefel", Loop(micro=2))
    yield Case("fsdp, mapped first", "3", "mixed", Loop("AdamW", clip=0.05))


def play_training(rank: int, folder: Path) -> dict:
    """The results of each case, and of the comparisons on two ranks."""
    join(rank, RANKS, ())
    there = meshes()
    found: dict = {}
    for case in cases():
        if there[case.mesh].get_coordinate() is not None:
            found[case] = case(there[case.mesh])
    if rank < 2:
        for play in embedding, after_evaluation, compiled, orders, half:
            found[play.__name__] = play(there["2"])
    dist.barrier()
    return found if OLD else found | checkpoints(there, folder)


def embedding(mesh: DeviceMesh) -> dict[str, float]:
    """How far a cut table's gradients are from one process's, by the way it is cut."""
    found = {}
    for style in BY_ROWS, BY_COLUMNS:
        torch.manual_seed(0)
        tables = nn.Embedding(9, 4, **F64), nn.Embedding(9, 4, **F64)
        tables[1].load_state_dict(tables[0].state_dict())
        parallelize_module(tables[0], mesh, style)
        for table in tables:
            move_(constraints.dissolve(table))
            loss = (table(torch.arange(9)) * drawn((9, 4), 0)).square().sum()
            (loss + constraints.penalty(table)).backward()
        ours, theirs = (next(each.parameters()).grad for each in tables)
        found[type(style).__name__] = off(ours, theirs)
    return found


def after_evaluation(mesh: DeviceMesh) -> dict[str, Any]:
    """Measures and projects a model that a forward pass has left whole on each rank."""
    model, *_ = by_fsdp(mesh, begin("stiefel"), "stiefel")
    expected, x = begin("stiefel"), batch(0)[0]
    with torch.no_grad():
        model(x)
        found: dict = {"layer": error_of(constraints.project_, model.up)}
        one, other = constraints.feasibility(model), constraints.feasibility(expected)
        model(x)
    for each in model, expected:
        constraints.project_(each)
    return found | {
        "feasibility": abs(one.weight - other.weight),
        "before": one.weight,
        "projection": max_difference(parameters(model), parameters(expected)),
        "left": constraints.feasibility(model).weight,
    }


def half(mesh: DeviceMesh) -> dict[str, float]:
    """How far bfloat16 gradients are from one process's, and those from float64's."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for way in "sharded", "bfloat16", "float64":
        model, parts, part = begin("stiefel"), 1, 0
        model = model if way == "float64" else model.float()
        if way == "sharded":
            _, parts, part = by_fsdp(mesh, model, "", LAYERS, mp_policy=policy)
        x, y = (each.chunk(parts)[part] for each in batch(0))
        named = dict(model.named_parameters())
        if way == "bfloat16":
            halves = {name: p.bfloat16() for name, p in named.items()}
            scores = functional_call(model, halves, x.bfloat16())
        else:
            scores = model(x if way == "float64" else x.float())
        loss = F.mse_loss(scores.to(y.dtype), y) + constraints.penalty(model)
        loss.backward()
        grads = [whole(p.grad).double().flatten() for p in model.parameters()]
        found[way] = torch.cat(grads)
    scale = found["float64"].norm()
    gap = (found["sharded"] - found["bfloat16"]).norm() / scale
    rounding = (found["bfloat16"] - found["float64"]).norm() / scale
    return {"gap": gap.item(), "rounding": rounding.item()}


def compiled(mesh: DeviceMesh) -> dict[str, float]:
    """How far a compiled layer's gradients in shards are from those of itself.

    Torch itself breaks the graph, at the hooks that gather the weights.
    """
    model, *_ = by_fsdp(mesh, begin("stiefel"), "stiefel")
    penalty, gradients, (x, _) = constraints.Constraints(model).penalty, [], batch(0)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean() + penalty()

    for each in loss, torch.compile(loss, backend="aot_eager"):
        model.zero_grad()
        each(x).backward()
        gradients.append([whole(p.grad) for p in model.parameters()])
    return {"fsdp": max(map(off, *gradients))}


def orders(mesh: DeviceMesh) -> dict[str, str]:
    """The errors of wrong orders."""
    free, layer, other = (nn.Linear(8, 4, **F64) for _ in range(3))
    map_before_gathering(constraints.dissolve(layer), mesh)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4, **F64)), mesh=mesh)
    parallel = parallelize_module, constraints.dissolve(other), mesh, BY_COLUMNS
    return {
        "parallelize_module": error_of(*parallel),
        "fully_shard": error_of(constraints.dissolve, model[0]),
        "free": error_of(map_before_gathering, free, mesh),
        "twice": error_of(map_before_gathering, layer, mesh),
    }


ADAM, FIRST, SECOND = Loop("Adam"), range(STEPS // 2), range(STEPS // 2, STEPS)


def checkpoints(there: dict[str, DeviceMesh], folder: Path) -> dict:
    """Saved on 2 ranks and on 2 x 2, loaded on 3: how these compare at the end."""
    for name, way in ("2", by_fsdp), ("2 x 2", by_both):
        mesh = there[name]
        if mesh.get_coordinate() is not None:
            model, parts, part = way(mesh, begin("stiefel"), "stiefel")
            optimizer = OPTIMIZERS["Adam"](model.parameters())
            replace(ADAM, parts=parts, part=part)(model, optimizer, FIRST)
            group = {"process_group": mesh.get_group() if mesh.ndim == 1 else None}
            dcp.save(state_of(model, optimizer), checkpoint_id=folder / name, **group)
    dist.barrier()
    mesh, found = there["3"], {}
    for name in ("2", "2 x 2") if mesh.get_coordinate() is not None else ():
        model = by_fsdp(mesh, begin("stiefel"), "stiefel")
        found["checkpoint", name] = gone_on(folder / name, *model, mesh.get_group())
    dist.barrier()
    return found


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    return dict(zip(("model", "its"), get_state_dict(model, optimizer), strict=True))


def gone_on(folder: Path, model: nn.Module, parts=1, part=0, group=None) -> dict:
    """How a model that goes on from a checkpoint compares at the end."""
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    state = state_of(model, optimizer)
    here = not dist.is_initialized()
    dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=here)
    states = {"model_state_dict": state["model"], "optim_state_dict": state["its"]}
    set_state_dict(model, optimizer, **states)
    replace(ADAM, parts=parts, part=part)(model, optimizer, SECOND)
    return compared(model, alone("stiefel", ADAM), begin("stiefel"))
