"""Roles for the tests of CDOpt's own layers in shards; workers must import them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from cdopt.manifold_torch import oblique_torch, stiefel_torch
from cdopt.nn import Linear_cdopt
from cdopt.nn.utils.set_constraints import set_constraint_dissolving
from shard_roles import F64, off
from shard_training_roles import STEPS, batch, by_ddp, by_fsdp, parameters
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints.surface import placed
from cdopt_tutorial.hybrid.replicas import join

MANIFOLDS = {"stiefel": stiefel_torch, "oblique": oblique_torch}
SIZES = (6, 8), (8, 7)  # of the two layers: one widens, one narrows, as CDOpt cares
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def of_layers(manifold: str) -> list[nn.Module]:
    options = {"manifold_class": MANIFOLDS[manifold], "penalty_param": 0.1, **F64}
    return [Linear_cdopt(*size, **options) for size in SIZES]


def of_set_constraints(manifold: str) -> list[nn.Module]:
    options = {"manifold_class": MANIFOLDS[manifold], "penalty_param": 0.1}
    layers = [nn.Linear(*size, **F64) for size in SIZES]
    for layer in layers:
        set_constraint_dissolving(layer, "weight", manifold_args=dict(F64), **options)
    return layers


KINDS = {
    "Linear_cdopt": of_layers,
    "set_constraint_dissolving": of_set_constraints,
}


@torch.no_grad()
def begin(kind: str, manifold: str) -> nn.Module:
    """Two layers of CDOpt, a little off their manifolds; the same on each rank."""
    torch.manual_seed(0)
    first, last = KINDS[kind](manifold)
    for p in moving(model := nn.Sequential(first, nn.Tanh(), last)):
        p.add_(0.05 * torch.randn_like(p))
        p.data = p.data.contiguous()  # FSDP takes no others, and CDOpt has turned some
    return model


def moving(model: nn.Module) -> list[nn.Parameter]:
    """CDOpt keeps an identity among the parameters, which must not move."""
    return [p for p in model.parameters() if p.requires_grad]


def train(model: nn.Module, parts=1, part=0) -> nn.Module:
    optimizer = torch.optim.SGD(moving(model), 0.1)
    for step in range(STEPS):
        x, y = (each.chunk(parts)[part] for each in batch(step))
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + constraints.penalty(model)).backward()
        optimizer.step()
    return model


def compared(model: nn.Module, alone: nn.Module) -> dict[str, float]:
    """Differences of parameters and feasibilities, before and after a projection."""
    found = {"parameters": furthest(model, alone)}
    one, other = constraints.feasibility(model), constraints.feasibility(alone)
    pairs = (one.weight, other.weight), (one.mapped, other.mapped)
    found["feasibility"] = max(abs(our - their) for our, their in pairs)
    found["before"] = one.weight
    for each in model, alone:
        constraints.project_(each)
    left = constraints.feasibility(model).weight
    return found | {"projection": furthest(model, alone), "left": left}


def furthest(model: nn.Module, alone: nn.Module) -> float:
    ours, theirs = parameters(model), parameters(alone)
    return max(off(ours[name], theirs[name]) for name in theirs)


# What follows runs on the ranks.


def play_cdopt(rank: int) -> dict:
    """Each kind of layer under each way, and what leads further."""
    join(rank, 2, ())
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for kind, manifold in cases():
        for way, spread in {"ddp": by_ddp, "fsdp": by_fsdp}.items():
            model = train(*spread(mesh, begin(kind, manifold)))
            alone = train(begin(kind, manifold))
            found[way, kind, manifold] = compared(model, alone)
        refused = told(parallelize_module, begin(kind, manifold), mesh, PLAN)
        found["refused", kind, manifold] = refused
        found["way out", kind, manifold] = way_out(mesh, kind, manifold)
    return found


def cases() -> Iterator[tuple[str, str]]:
    return ((kind, manifold) for kind in KINDS for manifold in MANIFOLDS)


def told(action: Callable[..., Any], *args: Any) -> str:
    try:
        action(*args)
    except (NotImplementedError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def way_out(mesh: DeviceMesh, kind: str, manifold: str) -> float:
    """How far a plain model, dissolved under tensor parallel, is from CDOpt's alone."""
    alone = begin(kind, manifold)
    first, last = (nn.Linear(*size, **F64) for size in SIZES)
    plain = nn.Sequential(first, nn.Tanh(), last)
    parallelize_module(plain, mesh, PLAN)
    for ours, theirs in zip(plain, alone, strict=True):
        if isinstance(ours, nn.Linear):
            dissolve_as(ours, theirs, manifold)
    train(plain)
    train(alone)
    x = batch(0)[0]
    return off(plain(x), alone(x))


@torch.no_grad()
def dissolve_as(ours: nn.Linear, theirs: nn.Module, manifold: str) -> None:
    """Hold a plain layer as one of CDOpt is held, at the same weight."""
    rows, columns = ours.weight.shape
    # Which side CDOpt's X lies on depends on the kind, where the layer is not square.
    constraints.dissolve(ours, manifold=manifold, transpose=columns > rows)
    held = ours.parametrizations.weight.original
    weight = theirs.weight
    if hasattr(theirs, "parametrizations"):  # which keeps X itself
        x = theirs.parametrizations.weight.original
        weight = x.mT if columns > rows else x
    held.copy_(placed(weight.contiguous(), held))
    ours.bias.copy_(placed(theirs.bias, ours.bias))
