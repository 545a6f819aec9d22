"""Roles for the tests of dissolving's rivals; they must be importable by workers."""

import itertools
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from constrained import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_roles import off
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cdopt_tutorial.constraints.fused import Sums
from cdopt_tutorial.constraints.rivals import BY_MUON, RULES, Rival
from cdopt_tutorial.constraints.surface import surface, whole
from cdopt_tutorial.engines import process_group
from cdopt_tutorial.engines.probes.counted import Sent

RANKS, STEPS = 3, 2
SIZES = st.integers(1, 9)


def start(rule: str, rows: int, columns: int, blocks: int, seed: int) -> Tensor:
    """A weight a little off the manifold, where that may be."""
    weight = drawn((blocks * rows, columns), seed)
    off = 0.0 if rule == "manifold-muon" else 0.01
    return surface("stiefel", weight, blocks).nearest(weight) + off * weight


def steps(rule: str, weight: Tensor, blocks: int, seed: int) -> Tensor:
    """The whole weight after a few steps, with gradients that only the seed knows."""
    weight = weight.clone().requires_grad_()
    rival = Rival(rule, {weight: surface("stiefel", weight, blocks)}, 0.05, 0.9)
    for number in range(STEPS):
        grad = drawn(weight.shape, seed + number + 1)
        if isinstance(weight, DTensor):
            grad = distribute_tensor(grad, weight.device_mesh, weight.placements)
        weight.grad = grad
        rival.step()
    return whole(weight.detach())


def furthest(meshes: list[DeviceMesh], rule: str, blocks: int, *sizes: int) -> float:
    """The weight on each mesh, cut either way, from the one in one process."""
    *shape, seed = sizes
    plain, tried = start(rule, *shape, blocks, seed), []
    expected = steps(rule, plain, blocks, seed)
    for mesh, cut in itertools.product(meshes, (Replicate(), Shard(0), Shard(1))):
        weight = distribute_tensor(plain, mesh, [cut])
        tried.append(off(steps(rule, weight, blocks, seed), expected))
    return max(tried)


def play_rivals(rank: int) -> dict:
    """The largest differences that a search has found, and what each rule sends."""
    process_group.join(rank, RANKS, gpus=())
    meshes = [DeviceMesh("cpu", range(number)) for number in (1, 2, 3)]
    here = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    found = dict.fromkeys(RULES, 0.0)

    # All ranks draw the same, since they agree on what they found.
    @settings(derandomize=True, deadline=None, database=None, max_examples=12)
    @given(st.tuples(st.integers(1, 4), *3 * [SIZES]))
    def search(sizes: tuple[int, ...]) -> None:
        worst = torch.tensor([furthest(here, rule, *sizes) for rule in RULES])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        for rule, each in zip(RULES, worst.tolist(), strict=True):
            found[rule] = max(found[rule], each)
        assert worst.max() < 1e-9, sizes

    search()
    with mock.patch.object(Sums, "inside", lambda self, part: part):
        found["control"] = furthest(meshes[2:], "projected", 1, 9, 4, 0)
    return {"differences": found, "sent": dict(sent(meshes[2]))}


def sent(mesh: DeviceMesh) -> Iterator[tuple[str, tuple[int, int]]]:
    """By rule, how many all-reduces a step makes, and of how many numbers."""
    for rule in RULES:
        weight = distribute_tensor(start(rule, 24, 4, 1, 0), mesh, [Shard(0)])
        weight.grad = distribute_tensor(drawn((24, 4), 1), mesh, [Shard(0)])
        rival = Rival(rule, {weight: surface("stiefel", weight)}, 0.05, 0.9)
        with Sent() as counted:
            rival.step()
        yield rule, (counted.collectives, counted.bytes // 8)


EXACT = {rule: 1e-10 if rule in BY_MUON else 1e-12 for rule in RULES}
