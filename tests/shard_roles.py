"""Roles for the tests of weights in shards; they must be importable by workers."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cdopt.manifold_torch import generalized_stiefel_torch, grassmann_torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from cdopt_tutorial.constraints.sharded import Layout
from cdopt_tutorial.constraints.surface import Surface, surface
from cdopt_tutorial.engines.probes.counted import Sent
from cdopt_tutorial.hybrid.replicas import join

F64 = {"dtype": torch.float64}
RANKS = 4


@dataclass(frozen=True)
class Kind:
    """A manifold, and how a weight lies on it."""

    manifold: Any
    blocks: int = 1
    transpose: bool | None = None

    def of(self, weight: Tensor) -> Surface:
        return surface(self.manifold, weight, self.blocks, self.transpose)


KINDS = {
    "stiefel": Kind("stiefel"),
    "stiefel, 4 blocks": Kind("stiefel", 4),
    "oblique rows": Kind("oblique"),
    "oblique columns": Kind("oblique", transpose=True),
    "oblique columns, 4 blocks": Kind("oblique", 4, True),
    "sphere": Kind("sphere"),
}
#: Manifolds of CDOpt for which there is no map in parts.
OTHERS = {
    "grassmann": Kind(grassmann_torch, transpose=False),
    "generalized stiefel": Kind(
        partial(generalized_stiefel_torch, B=lambda x: 2 * x), transpose=False
    ),
}
# Uneven on 2 and 3 ranks, with empty shards, of one element, square, of 3 and 4 axes.
AWKWARD = [(1, 1), (7, 3), (3, 7), (5, 5), (1, 4), (4, 1), (4, 2, 3, 3), (9, 1, 2)]


def shapes(kind: Kind, seed: int) -> Iterator[tuple[int, ...]]:
    """A random shape of weights that split into a kind's blocks, and awkward ones."""
    chance = random.Random(seed)
    for rows, *columns in AWKWARD[seed % 4 :: 4]:
        yield kind.blocks * rows, *columns
    axes = [chance.randint(1, 9) for _ in range(chance.choice((2, 2, 3, 4)))]
    yield kind.blocks * axes[0], axes[1], *(min(axis, 3) for axis in axes[2:])


@dataclass(frozen=True)
class Spread:
    """Puts a tensor that all ranks have onto a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __call__(self, value: Tensor) -> DTensor:
        return distribute_tensor(value, self.mesh, self.placements)


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, **F64)


def meshes() -> dict[str, DeviceMesh]:
    """Of 2, of 3 and of 2 x 2 ranks; all ranks must make them, and some are in each."""
    return {
        "2": DeviceMesh("cpu", [0, 1]),
        "3": DeviceMesh("cpu", [1, 2, 3]),
        "2 x 2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    }


def off(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a part of the largest element if that is above 1."""
    one, other = (whole(each).detach() for each in (one, other))
    if one.shape != other.shape:
        return math.inf
    found = ((one - other).abs().max() / other.abs().max().clamp(min=1)).item()
    return found if math.isfinite(found) else math.inf


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# What follows runs on the ranks of the tests of maps.


def play_maps(rank: int) -> dict:
    """The largest differences of each kind on each mesh, and the collectives."""
    join(rank, RANKS, ())
    found: dict = {"differences": {}}
    for name, mesh in meshes().items():
        if mesh.get_coordinate() is not None:
            for kind, case in (KINDS | OTHERS).items():
                tried = [differences(case, *one) for one in weights(case, kind, mesh)]
                found["differences"][name, kind] = largest(tried)
        dist.barrier()
    found["differences"] |= play_strided(mesh)
    found["control"] = control(mesh)
    found["talk"] = play_talk(mesh)
    found["autocast"] = under_autocast(mesh)
    found["partial"] = refusal_of_partial(mesh)
    return found


def largest(tried: list[dict]) -> dict:
    """Of each difference; and how many there were."""
    return {"cases": len(tried)} | {
        what: max(each[what] for each in tried) for what in tried[0]
    }


def weights(case: Kind, name: str, mesh: DeviceMesh) -> Iterator[tuple]:
    """Weights of many shapes, each in every placement on a mesh."""
    seed = mesh.size() + len(name)  # what one mesh has not, another has
    # What is gathered is so whatever its shape.
    tried = [(7, 3)] if name in OTHERS else [*shapes(case, seed)]
    for number, shape in enumerate(tried):
        if mesh.ndim > 1 and number != seed % len(tried):
            continue  # there are many placements
        value, onto = 0.6 * drawn(shape, number), drawn(shape, number + 99)
        axes = [Shard(axis) for axis in range(len(shape))]
        each = [Replicate(), *(axes if mesh.ndim == 1 else axes[:2])]
        for placements in itertools.product(each, repeat=mesh.ndim):
            yield value, onto, Spread(mesh, placements)


def differences(
    case: Kind, value: Tensor, onto: Tensor, spread: Callable[[Tensor], DTensor]
) -> dict[str, float]:
    """Of a weight in shards from the plain one: results, gradients and the nearest."""
    plain, shards = value.clone().requires_grad_(), spread(value).requires_grad_()
    on = case.of(plain)
    expected, given = results(on, plain, onto), results(on, shards, spread(onto))
    placed = [each for each in given if isinstance(each, DTensor)]
    assert len(placed) == 4
    assert all(each.placements == shards.placements for each in placed)
    names = ("map", "distance", "alone", "gradient", "of distance", "of map")
    pairs = zip(names, given, expected, strict=True)
    found = {name: off(one, other) for name, one, other in pairs}
    return {**found, "nearest": nearest(on, shards.detach(), value)}


def results(on: Surface, weight: Tensor, onto: Tensor) -> list[Tensor]:
    """A(W), ‖C(W)‖² with it and alone, and three gradients."""
    mapped, distance = on.map_and_distance(weight)
    alone, some = on.distance(weight), torch.full_like(distance, 0.7)
    # Of their product with `onto`, whose own backward pass a DTensor takes long for.
    (of_map,) = torch.autograd.grad(mapped, weight, onto, retain_graph=True)
    (both,) = torch.autograd.grad([mapped, distance], weight, [onto, some])
    (of_distance,) = torch.autograd.grad(alone, weight)
    return [mapped, distance, alone, both, of_distance, of_map]


def nearest(on: Surface, shards: DTensor, value: Tensor) -> float:
    """How far the nearest is from the plain one; both may refuse, but only both."""
    try:
        expected = on.nearest(value)
    except ValueError:
        try:
            on.nearest(shards)
        except ValueError:
            return 0.0
        return math.inf
    return off(on.nearest(shards), expected)


def play_strided(mesh: DeviceMesh) -> dict:
    """A weight cut by tensor parallel, and what is left again, on the same axis."""
    found = {}
    for kind, case in KINDS.items():
        tried = []
        for number, (rows, columns) in enumerate([(4, 3), (4, 9)]):
            shape = case.blocks * rows, columns
            value, onto = 0.6 * drawn(shape, number), drawn(shape, number + 99)
            tried.append(differences(case, value, onto, partial(strided, mesh)))
        found["strided", kind] = largest(tried)
    return found


def strided(mesh: DeviceMesh, value: Tensor) -> DTensor:
    layer = nn.Linear(*reversed(value.shape), **F64)
    with torch.no_grad():
        layer.weight.copy_(value)
    fully_shard(
        parallelize_module(layer, mesh["tp"], ColwiseParallel()), mesh=mesh["dp"]
    )
    assert type(layer.weight.placements[0]) is _StridedShard
    return layer.weight.detach()


def control(mesh: DeviceMesh) -> float:
    """What the differences would be if a rank's own sums were taken for all."""
    value = drawn((8, 3), 0)
    alone, inside = distribute_tensor(value, mesh, [Shard(0)] * 2), Layout.inside
    try:
        Layout.inside = lambda self, part: None
        mapped, _ = KINDS["stiefel"].of(value).map_and_distance(alone)
    finally:
        Layout.inside = inside
    return off(mapped, KINDS["stiefel"].of(value).map_and_distance(value)[0])


def under_autocast(mesh: DeviceMesh) -> dict[str, float]:
    """What autocast changes in a map, and in a product beside it."""
    value = drawn((8, 3), 0).float()
    on = KINDS["stiefel"].of(value)
    shards = distribute_tensor(value, mesh, [Shard(0), Replicate()])
    plain = on.map_and_distance(value)[0], on.distance(value), on.nearest(value)
    with torch.autocast("cpu", torch.bfloat16):
        given = on.map_and_distance(shards)[0], on.distance(shards), on.nearest(shards)
        beside = value.mT @ value
    return {
        "ours": max(map(off, given, plain)),
        "control": off(beside, value.mT @ value),
    }


def refusal_of_partial(mesh: DeviceMesh) -> str:
    on, value = KINDS["stiefel"].of(torch.ones(4, 3)), torch.ones(4, 3)
    sums = DTensor.from_local(value, mesh, [Partial(), Replicate()])
    try:
        on.distance(sums)
    except ValueError as error:
        return str(error)
    return ""


#: A name: the kind, the shape and the placements, of which p, or q, is the short side.
SPOKEN = {
    "replicated": ("stiefel", (24, 4), "RR"),
    "long side": ("stiefel", (24, 4), "SR"),
    "long side, wide": ("stiefel", (4, 24), "CR"),
    "long side, twice": ("stiefel", (24, 4), "SS"),
    "short side": ("stiefel", (24, 4), "CR"),
    "short side, wide": ("stiefel", (4, 24), "SR"),
    "both sides": ("stiefel", (24, 4), "SC"),
    "square": ("stiefel", (8, 8), "SR"),
    "square, columns": ("stiefel", (8, 8), "CR"),
    "whole blocks": ("stiefel, 4 blocks", (24, 4), "SR"),
    "within blocks, long": ("stiefel, 4 blocks", (16, 8), "CR"),
    "within blocks, short": ("stiefel, 4 blocks", (24, 4), "CR"),
    "oblique, rows": ("oblique rows", (24, 4), "SR"),
    "oblique, in rows": ("oblique rows", (24, 4), "CR"),
    "sphere": ("sphere", (24, 4), "SR"),
    "others": ("grassmann", (24, 4), "SR"),
}


def play_talk(mesh: DeviceMesh) -> dict:
    """Numbers and bytes of the collectives of a map with its distance, and back."""
    letters = {"R": Replicate(), "S": Shard(0), "C": Shard(1)}
    return {
        name: heard(kind, shape, mesh, [letters[letter] for letter in placements])
        for name, (kind, shape, placements) in SPOKEN.items()
    }


def heard(kind: str, shape: tuple, mesh: DeviceMesh, placements: list) -> tuple:
    weight = distribute_tensor(drawn(shape, 0), mesh, placements).requires_grad_()
    onto = distribute_tensor(drawn(shape, 1), mesh, placements)
    on = (KINDS | OTHERS)[kind].of(weight)
    with Sent() as sent:
        mapped, distance = on.map_and_distance(weight)
        total = (mapped.to_local() * onto.to_local()).sum() + 0.7 * distance
        total.backward()
    return sent.collectives, sent.bytes
