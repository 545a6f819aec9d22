"""Roles for the tests of weights in shards; they must be importable by workers."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from constrained import F64, drawn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from cdopt_tutorial.constraints import dissolve, penalty
from cdopt_tutorial.constraints.manifolds import (
    Manifold,
    manifold_of,
    squared_distances,
)
from cdopt_tutorial.constraints.sums import whole
from cdopt_tutorial.probes.counted import Sent
from cdopt_tutorial.run.process_group import join

RANKS = 4
#: By name: the manifold, the blocks of a weight, and whether it is transposed.
KINDS = {
    "stiefel": ("stiefel", 1, False),
    "stiefel, 4 blocks": ("stiefel", 4, False),
    "oblique rows": ("oblique", 1, False),
    "oblique columns": ("oblique", 1, True),
    "oblique columns, 4 blocks": ("oblique", 4, True),
    "sphere": ("sphere", 1, False),
    "sphere, 4 blocks": ("sphere", 4, False),
}
# Of a block: uneven on 2 and 3 ranks, with empty shards, square, with 4 axes.
SHAPES = [(7, 3), (3, 7), (5, 5), (1, 4), (4, 2, 3, 3)]


def of_kind(kind: str, weight: Tensor) -> Manifold:
    manifold, blocks, transpose = KINDS[kind]
    return manifold_of(manifold, weight, blocks, transpose)


def meshes() -> dict[str, DeviceMesh]:
    """Of 2, 3 and 2 x 2 ranks; every rank must make all of them."""
    return {
        "2": DeviceMesh("cpu", [0, 1]),
        "3": DeviceMesh("cpu", [1, 2, 3]),
        "2 x 2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    }


def off(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest element if that is above 1."""
    one, other = (whole(each).detach() for each in (one, other))
    if one.shape != other.shape:
        return math.inf
    found = ((one - other).abs().max() / other.abs().max().clamp(min=1)).item()
    return found if math.isfinite(found) else math.inf


def error_of(action: Callable[..., Any], *args: Any) -> str:
    """The text of an error, or none."""
    try:
        action(*args)
    except (ValueError, KeyError, RuntimeError) as error:
        return str(error)
    return ""


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """This process is the first of so many ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def play_maps(rank: int) -> dict:
    """The largest differences of each kind on each mesh, and other comparisons."""
    join(rank, RANKS, ())
    found: dict = {}
    for name, mesh in meshes().items():
        if mesh.get_coordinate() is not None:
            found["together", name] = together(mesh)
            for kind in KINDS if name != "2" else ():  # 2 x 2 ranks have its cuts
                tried = [differences(kind, *each) for each in weights(kind, mesh)]
                found[name, kind] = largest(tried)
        dist.barrier()
    found["autocast"] = under_autocast(mesh)
    if (two := meshes()["2"]).get_coordinate() is not None:
        found["under fsdp"] = [under_fsdp(two, each) for each in (False, True)]
    found["talk"] = {name: heard(mesh, *case[:3]) for name, case in TALK.items()}
    return found


def largest(tried: list[dict]) -> dict[str, float]:
    return {what: max(each[what] for each in tried) for what in tried[0]}


def weights(kind: str, mesh: DeviceMesh) -> Iterator[tuple]:
    """Weights of several shapes, each in every placement on a mesh."""
    for rows, *columns in SHAPES if mesh.ndim == 1 else SHAPES[:2]:
        value = 0.6 * drawn((KINDS[kind][1] * rows, *columns), 0)
        cuts = [Replicate(), *map(Shard, range(value.ndim))]
        for placements in itertools.product(cuts, repeat=mesh.ndim):
            of = {"device_mesh": mesh, "placements": placements}
            # All ranks have the value, so nothing needs to be sent.
            yield value, partial(distribute_tensor, **of, src_data_rank=None)


def differences(
    kind: str, value: Tensor, spread: Callable[[Tensor], DTensor]
) -> dict[str, float]:
    """How far a sharded weight's results and gradients are from a plain one's."""
    plain, shards = value.clone().requires_grad_(), spread(value).requires_grad_()
    on, onto = of_kind(kind, plain), drawn(value.shape, 1)
    expected, given = results(on, plain, onto), results(on, shards, spread(onto))
    placed = [each for each in given.values() if isinstance(each, DTensor)]
    assert len(placed) == 5
    assert all(each.placements == shards.placements for each in placed)
    return {name: off(given[name], expected[name]) for name in expected}


def results(on: Manifold, weight: Tensor, onto: Tensor) -> dict[str, Tensor]:
    """A(W), ‖C(W)‖² with it and alone, three gradients, and the nearest."""
    mapped, distance = on.map_and_distance(weight)
    alone, some = on.distance(weight), torch.full_like(distance, 0.7)
    # As of their product with `onto`, whose backward pass is slow for a DTensor.
    (of_map,) = torch.autograd.grad(mapped, weight, onto, retain_graph=True)
    (both,) = torch.autograd.grad([mapped, distance], weight, [onto, some])
    (of_alone,) = torch.autograd.grad(alone, weight)
    found = {"map": mapped, "distance": distance, "alone": alone}
    found |= {"of map": of_map, "of both": both, "of alone": of_alone}
    return found | {"nearest": on.nearest(weight.detach())}


def together(mesh: DeviceMesh) -> dict[str, float]:
    """Distances of several weights at once: collectives, and how far they are off."""
    kinds, off_by = ("stiefel", "stiefel", "oblique rows", "sphere"), []
    cut = [Shard(0), Replicate()][: mesh.ndim]
    plain = [drawn(n, 0, True) for n in ((24, 4), (7, 3), (5, 5), (9, 2))]
    parts = [distribute_tensor(w.detach(), mesh, cut).requires_grad_() for w in plain]
    with Sent() as sent:
        at_once = squared_distances(zip(map(of_kind, kinds, parts), parts, strict=True))
    for kind, weight, part, distance in zip(kinds, plain, parts, at_once, strict=True):
        alone = of_kind(kind, weight).distance(weight)
        (ours,), (theirs,) = map(torch.autograd.grad, (distance, alone), (part, weight))
        off_by += [off(distance, alone), off(ours, theirs)]
    return {"collectives": sent.collectives, "off": max(off_by)}


def under_autocast(mesh: DeviceMesh) -> dict[str, float]:
    """What autocast changes in a map, and in a plain product."""
    value = drawn((8, 3), 0).float()
    on = of_kind("stiefel", value)
    shards = distribute_tensor(value, mesh, [Shard(0), Replicate()])
    plain = on.map_and_distance(value)[0], on.distance(value), on.nearest(value)
    with torch.autocast("cpu", torch.bfloat16):
        given = on.map_and_distance(shards)[0], on.distance(shards), on.nearest(shards)
        beside = value.mT @ value
    control = off(beside, value.mT @ value)
    return {"ours": max(map(off, given, plain)), "control": control}


# Numbers that a rank sends: in sums of C, of a scalar, or of its part of the weight.
C, SCALAR, PART, HALF = 4 * 4, 1, 12 * 4, 6 * 4
#: By name: a kind, a shape, the placements, and the numbers in each collective of the
#: forward and backward pass, as `sharded.layout` says.
TALK = {
    "replicated": ("stiefel", (24, 4), "RR", []),
    "long side": ("stiefel", (24, 4), "SR", [C, C]),
    "long side, twice": ("stiefel", (24, 4), "SS", [C] * 4),
    "short side": ("stiefel", (24, 4), "CR", [PART, C, PART] * 2),
    "both sides": ("stiefel", (24, 4), "SC", [HALF, C, C, HALF] * 2),
    "square": ("stiefel", (8, 8), "SR", [8 * 8] * 2),
    "square, columns": ("stiefel", (8, 8), "CR", [8 * 8] * 2),
    "whole blocks": ("stiefel, 4 blocks", (24, 4), "SR", [SCALAR]),
    "within blocks, long": ("stiefel, 4 blocks", (16, 8), "CR", [4 * C] * 2),
    "within blocks, short": ("stiefel, 4 blocks", (24, 4), "CR", [PART, PART]),
    "oblique, rows": ("oblique rows", (24, 4), "SR", [SCALAR]),
    "oblique, in rows": ("oblique rows", (24, 4), "CR", [24, 24]),
    "sphere": ("sphere", (24, 4), "SR", [SCALAR, SCALAR]),
    "oblique, columns": ("oblique columns", (24, 4), "CR", [SCALAR]),
    "oblique, in columns": ("oblique columns", (24, 4), "SR", [4, 4]),
}


def under_fsdp(mesh: DeviceMesh, is_constrained: bool) -> tuple[int, int]:
    """Number and bytes of the collectives of a step of a layer of 4 x 6."""
    layer = nn.Linear(4, 6, bias=False, **F64)
    if is_constrained:
        dissolve(layer)
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    with Sent() as sent:
        loss = layer(torch.ones(2, 4, **F64)).sum()
        if is_constrained:
            loss = loss + penalty(layer)
        loss.backward()
    return sent.collectives, sent.bytes


def heard(mesh: DeviceMesh, kind: str, shape: tuple, letters: str) -> tuple[int, int]:
    """Number and bytes of the collectives of a map with its distance, and backward."""
    cuts = {"R": Replicate(), "S": Shard(0), "C": Shard(1)}
    placements = [cuts[letter] for letter in letters]
    weight = distribute_tensor(drawn(shape, 0), mesh, placements).requires_grad_()
    on = of_kind(kind, weight)
    with Sent() as sent:
        mapped, distance = on.map_and_distance(weight)
        (mapped.to_local().square().sum() + 0.7 * distance).backward()
    return sent.collectives, sent.bytes
