"""A process group of workers: where each of them computes, and how they talk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cdopt_tutorial.engines.launcher.process import meeting


@dataclass(frozen=True)
class Devices:
    """Where the members of a group compute, and how they talk to each other."""

    backend: str  #: of the process group, "gloo" or "nccl"
    device: str  #: of one member
    why: str  #: the reason, to be told


def devices(
    rank: int,
    world_size: int,
    gpus: Sequence[str],
    who: str = "ranks",
    ddp_only: bool = False,
) -> Devices:
    """Choose for one member by all GPUs; NCCL refuses two members on one of them.

    Then it is gloo, which takes from a GPU what DDP exchanges and not what others do:
    shards and stages compute on the CPU there.
    """
    if not gpus:
        return Devices("gloo", "cpu", "gloo: no GPU is used")
    device = gpus[rank % len(gpus)]
    if world_size <= len(gpus):
        return Devices("nccl", device, f"nccl: each of the {who} has a GPU of its own")
    why = f"gloo: {world_size} {who} for {len(gpus)} GPU(s)"
    if ddp_only:
        return Devices("gloo", device, why)
    return Devices("gloo", "cpu", f"{why}, and shards and stages stay on the CPU")


def join(rank: int, world_size: int, gpus: Sequence[str], **choice: Any) -> Devices:
    """Enter the default process group, until the process ends; once on each member.

    The arguments are those of :func:`devices`, which chooses.
    """
    # To destroy it after an all-reduce hangs at times: it waits for gloo with the GIL.
    chosen = devices(rank, world_size, gpus, **choice)
    if chosen.device != "cpu":
        torch.cuda.set_device(chosen.device)  # else all meshes and NCCL take the first
    place = {"rank": rank, "world_size": world_size}
    dist.init_process_group(chosen.backend, meeting("members"), **place)
    return chosen
