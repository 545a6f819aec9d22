"""Muon with one owner for each weight, which takes the whole step of it alone.

The weights are dealt out to the ranks. An owner collects the direction of each of its
weights, and sends every rank its rows of the step, so a rank sends its part of all
weights twice, however many sums a step takes in ``rivals``; and the result is that of
one process to the bit. Source: torchtitan's distributed Muon (2026).
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cdopt_tutorial.constraints.rivals import Rival, finish, moving


class OwnedMuon(Rival):
    """Muon for weights cut into rows, as by ``fully_shard``, on one mesh.

    All ranks must step.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.0):
        super().__init__("muon", params, lr, momentum)

    def move(self, weights: list[tuple[Tensor, Tensor, dict]]) -> None:
        """Move weights by their directions, with two messages for each shape."""
        alike = defaultdict(list)
        for weight, direction, group in weights:
            alike[tuple(weight.shape), id(group)].append((weight, direction, group))
        for of_shape in alike.values():
            shards, directions, (group, *_) = zip(*of_shape, strict=True)
            parts = torch.stack([each.to_local().flatten(1) for each in directions])
            steps = _by_owners(parts, shards[0], group)
            for shard, step in zip(shards, steps, strict=True):
                shard.to_local().add_(step.view_as(shard.to_local()))


def _by_owners(parts: Tensor, like: DTensor, group: dict) -> Tensor:
    """This rank's rows of all steps, from its rows of all directions.

    Both are (weights, rows, columns); an owner has a run of the weights.
    """
    mesh, (number, _, columns) = like.device_mesh, parts.shape
    rank, ranks = mesh.get_local_rank(), mesh.size()
    rows, owned = _shares(len(like), ranks), _shares(number, ranks)
    sent = [share * rows[rank] * columns for share in owned]
    received = [owned[rank] * share * columns for share in rows]
    flat, back = parts.new_empty(sum(received)), torch.empty_like(parts)
    talk = mesh.get_group()
    dist.all_to_all_single(flat, parts.flatten(), received, sent, group=talk)
    pieces = zip(flat.split(received), rows, strict=True)
    whole = torch.cat([p.view(owned[rank], r, columns) for p, r in pieces], dim=1)
    steps = torch.zeros_like(whole)
    for step, direction in zip(steps, whole, strict=True):
        move = moving(step, direction.clone(), group)  # aligned as in one process
        finish(move, next(move)[0])
    flat = torch.cat([of_rank.flatten() for of_rank in steps.split(rows, dim=1)])
    dist.all_to_all_single(back.view(-1), flat, sent, received, group=talk)
    return back


def _shares(number: int, ranks: int) -> list[int]:
    """How many of so many rows DTensor gives each rank."""
    most = -(-number // ranks)
    return [max(0, min(most, number - rank * most)) for rank in range(ranks)]
