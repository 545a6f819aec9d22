"""Roles for the tests of checkpoints in shards; they must be importable by workers."""

from pathlib import Path

import shard_roles
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from shard_roles import RANKS, off, whole
from shard_training_roles import Block, batch, begin, by_both, by_fsdp, parameters
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

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
    """Saved on 2 ranks and on 2 x 2, loaded on 3; and by way of a free model."""
    join(rank, RANKS, ())
    there, found = shard_roles.meshes(), {}
    two, three, both = there.values()
    if rank < 2:
        model, *mine = by_fsdp(two, begin("stiefel"))
        save(folder / "2", model, trained(model, FIRST, *mine), two.get_group())
        to_free(folder / "free", model, two)
    model, *mine = by_both(both, begin("stiefel"), "stiefel")
    save(folder / "2 x 2", model, trained(model, FIRST, *mine))
    dist.barrier()
    if rank > 0:
        for name in "2", "2 x 2":
            model, *mine = by_fsdp(three, begin("stiefel"))
            ours = gone_on(folder / name, model, *mine, three.get_group())
            found[name] = furthest(ours, parameters(expected()))
        found |= from_free(folder / "free", three)
    dist.barrier()
    return found


def to_free(folder: Path, model: nn.Module, mesh: DeviceMesh) -> None:
    """Save what a free model would need to compute as this one."""
    state = constraints.free_state_dict(model)
    placed = {name: each.placements for name, each in state.items()}
    assert set(placed.values()) == {each.placements for each in model.parameters()}
    dcp.save({"model": state}, checkpoint_id=folder, process_group=mesh.get_group())


def from_free(folder: Path, mesh: DeviceMesh) -> dict[str, float]:
    """Load it on others into a free model, and from there into one that is held."""
    alone = begin("stiefel")
    trained(alone, FIRST)
    free = fully_shard(Block(), mesh=mesh)
    state = {"model": free.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    free.load_state_dict(state["model"])
    held, x = by_fsdp(mesh, begin("stiefel"))[0], batch(0)[0]
    constraints.load_free_state_dict(held, free.state_dict())
    alone_too = begin("stiefel")
    constraints.load_free_state_dict(alone_too, plain(free))
    again, *_ = by_fsdp(mesh, begin("stiefel"))
    constraints.load_free_state_dict(again, plain(free))
    with torch.no_grad():
        return {
            "free": off(free(x), alone(x)),
            "back": furthest(parameters(held), parameters(alone_too)),
            "back, plain": furthest(parameters(again), parameters(alone_too)),
            "left": constraints.feasibility(held).weight,
            "placed": all(isinstance(each, DTensor) for each in held.parameters()),
        }


def plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(each) for name, each in model.state_dict().items()}
