"""Roles for the tests of training in shards; they must be importable by workers."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from cdopt.manifold_torch import oblique_torch, stiefel_torch
from cdopt.nn import Linear_cdopt
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
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
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
#: CDOpt's own layers, by names beside those of the manifolds.
CDOPT = {"CDOpt's stiefel": stiefel_torch, "CDOpt's oblique": oblique_torch}


def dissolve_(model: Block, manifold: str) -> Block:
    for name, layer in model.named_children():
        on = MIXED[name] if manifold == "mixed" else manifold
        # The tall weight has three square blocks; a sphere takes none.
        blocks = 3 if name == "up" and on != "sphere" else 1
        constraints.dissolve(layer, manifold=on, blocks=blocks)
    return model


def of_cdopt(manifold: str) -> nn.Module:
    """A layer that widens and one that narrows, which CDOpt treats differently."""
    options = {"manifold_class": CDOPT[manifold], "penalty_param": 0.1, **F64}
    first, last = (Linear_cdopt(*size, **options) for size in ((6, 8), (8, 7)))
    return nn.Sequential(first, nn.Tanh(), last)


@torch.no_grad()
def begin(manifold: str) -> nn.Module:
    """The same on every rank, a little off the manifolds."""
    torch.manual_seed(0)
    model = of_cdopt(manifold) if manifold in CDOPT else dissolve_(Block(), manifold)
    for parameter in model.parameters():
        if parameter.requires_grad:  # unlike CDOpt's identity matrix
            parameter.add_(0.05 * torch.randn_like(parameter))
            parameter.data = parameter.data.contiguous()  # CDOpt transposes some
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
    model = model.module if isinstance(model, DistributedDataParallel) else model
    named = model.named_parameters()
    return {name: whole(p).detach() for name, p in named if p.requires_grad}


# Ways to distribute a model; each returns it, the number of data shards, and its own.


def by_ddp(mesh: DeviceMesh, start: nn.Module, manifold: str) -> tuple:
    model = DistributedDataParallel(start, process_group=mesh.get_group())
    return model, mesh.size(), mesh.get_local_rank()


def by_fsdp(mesh: DeviceMesh, start: nn.Module, manifold: str, layers=(), **options):
    for name in layers:
        fully_shard(start.get_submodule(name), mesh=mesh, **options)
    fully_shard(start, mesh=mesh, **options)
    return start, mesh.size(), mesh.get_local_rank()


@torch.no_grad()
def by_tensor(mesh: DeviceMesh, start: Block, manifold: str, last: Any) -> tuple:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "last": last}
    model = dissolve_(parallelize_module(Block(), mesh, plan), manifold)
    values = parameters(start)
    for name, parameter in model.named_parameters():
        # By a copy, because an assignment would project the weight.
        parameter.copy_(placed(values[name], parameter))
    return model, 1, 0


def by_both(mesh: DeviceMesh, start: Block, manifold: str) -> tuple:
    model, *_ = by_tensor(mesh["tp"], start, manifold, BY_ROWS)
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
    "ddp": by_ddp,
    "fsdp": by_fsdp,
    "fsdp per layer": functools.partial(by_fsdp, layers=LAYERS),
    "fsdp by columns": functools.partial(
        by_fsdp, shard_placement_fn=lambda p: Shard(p.ndim - 1)
    ),
    "tensor, columns last": functools.partial(by_tensor, last=BY_COLUMNS),
    "tensor, rows last": functools.partial(by_tensor, last=BY_ROWS),
    "fsdp and tensor": by_both,
    "fsdp, checkpointed": by_checkpoints,
    "fsdp from meta": from_meta,
    "fsdp, mapped first": by_mapping_first,
}


RECIPE = "fsdp, checkpointed", "fsdp from meta"
MAPPED_FIRST = "fsdp, mapped first"


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
    """All that this torch can do: each way, and options that matter to some of them."""
    new = ("fsdp by columns", "fsdp and tensor") if OLD else ()
    ways = [way for way in WAYS if way not in (*new, *RECIPE, MAPPED_FIRST)]
    for number, way in enumerate(ways):
        mesh = "2 x 2" if way == "fsdp and tensor" else "23"[number % 2]
        yield Case(way, mesh)
        if way not in ("ddp", "fsdp per layer"):
            yield Case(way, mesh, "mixed", Loop("Adam"))
    yield Case("fsdp", "2", loop=Loop("momentum", clip=0.05))
    yield Case("tensor, rows last", "3", loop=Loop("AdamW", clip=0.05))
    yield Case("fsdp per layer", "2", loop=Loop(micro=2))
    yield Case("fsdp per layer", "3", loop=Loop(clip=0.05, micro=2))
    for way in RECIPE:
        yield Case(way, "2", loop=Loop(micro=2))
        yield Case(way, "3", loop=Loop("AdamW"))
    for manifold in "stiefel", "mixed":
        yield Case(MAPPED_FIRST, "2", manifold, Loop(micro=2))
        yield Case(MAPPED_FIRST, "3", manifold, Loop("AdamW", clip=0.05))
    if not OLD:
        yield Case("fsdp and tensor", "2 x 2", loop=Loop(clip=0.05, micro=2))
    for way, manifold in itertools.product(("ddp", "fsdp"), CDOPT):
        yield Case(way, "2", manifold)


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


def compiled(mesh: DeviceMesh) -> dict[tuple[str, str], float]:
    """How far a compiled layer in shards is from itself; in one graph except for FSDP.

    There torch itself breaks the graph, at the hooks that gather the weights.
    """
    found, (x, _) = {}, batch(0)
    for way, manifold in ("fsdp", "stiefel"), ("tensor, columns last", "oblique"):
        model, *_ = WAYS[way](mesh, begin(manifold), manifold)
        penalty, gradients = constraints.Constraints(model).penalty, []

        def loss(x: Tensor, model=model, penalty=penalty) -> Tensor:
            return model(x).square().mean() + penalty()

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
    """The errors of wrong orders."""
    found = {}
    kinds, styles = (nn.Linear, nn.Embedding), (ColwiseParallel, RowwiseParallel)
    for kind, style in itertools.product(kinds, styles):
        layer = constraints.dissolve(kind(8, 4, **F64))
        name = f"{style.__name__} {kind.__name__}"
        found[name] = error_of(parallelize_module, layer, mesh, style())
    model = fully_shard(nn.Sequential(nn.Linear(4, 4, **F64)), mesh=mesh)
    found["fully_shard"] = error_of(constraints.dissolve, model[0])
    plain, layer = nn.Linear(4, 8, **F64), constraints.dissolve(nn.Linear(4, 8, **F64))
    map_before_gathering(layer, mesh)
    found["free"] = error_of(map_before_gathering, plain, mesh)
    found["twice"] = error_of(map_before_gathering, layer, mesh)
    theirs = Linear_cdopt(8, 4, manifold_class=stiefel_torch, **F64)
    return found | {"CDOpt": error_of(parallelize_module, theirs, mesh, BY_COLUMNS)}


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
