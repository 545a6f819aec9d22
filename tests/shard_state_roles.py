"""Roles for the tests of checkpoints in shards; they must be importable by workers."""

from pathlib import Path

import shard_roles
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from shard_roles import RANKS, off
from shard_training_roles import Block, batch, begin, by_both, by_fsdp, parameters
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from cdopt_tutorial import constraints
from cdopt_tutorial.hybrid.replicas import join

FIRST, SECOND = range(3), range(3, 6)


def trained(model: nn.Module, steps: range, parts=1, part=0, optimizer=None):
    """The optimizer, after some steps of it."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-2)
    held = constraints.Constraints(model)
    for step in steps:
        x, y = (each.chunk(parts)[part] for each in batch(step))
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + held.penalty()).backward()
        optimizer.step()
    return optimizer


def expected() -> Block:
    """What one process has after all steps."""
    model = begin("stiefel")
    trained(model, range(6))
    return model


def save(folder: Path, model: nn.Module, optimizer, group=None) -> None:
    ours, its = get_state_dict(model, optimizer)
    state = {"model": ours, "optimizer": its}
    dcp.save(state, checkpoint_id=folder, process_group=group)


def gone_on(folder: Path, model: nn.Module, parts=1, part=0, group=None) -> dict:
    """The parameters of a model that goes on from a checkpoint."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ours, its = get_state_dict(model, optimizer)
    state = {"model": ours, "optimizer": its}
    alone = not dist.is_initialized()
    dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=alone)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    trained(model, SECOND, parts, part, optimizer)
    return parameters(model)


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(off(ours[name], theirs[name]) for name in theirs)


# What follows runs on the ranks.


def play_states(rank: int, folder: Path) -> dict:
    """Saved on 2 ranks and on 2 x 2, loaded on 3."""
    join(rank, RANKS, ())
    there, found = shard_roles.meshes(), {}
    two, three, both = there.values()
    if rank < 2:
        model, *mine = by_fsdp(two, begin("stiefel"))
        save(folder / "2", model, trained(model, FIRST, *mine), two.get_group())
    model, *mine = by_both(both, begin("stiefel"), "stiefel")
    save(folder / "2 x 2", model, trained(model, FIRST, *mine))
    dist.barrier()
    if rank > 0:
        for name in "2", "2 x 2":
            model, *mine = by_fsdp(three, begin("stiefel"))
            ours = gone_on(folder / name, model, *mine, three.get_group())
            found[name] = furthest(ours, parameters(expected()))
    dist.barrier()
    return found
