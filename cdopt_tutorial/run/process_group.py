"""A process group of workers: where each computes, and how they communicate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cdopt_tutorial.run.worker import group_options


@dataclass(frozen=True)
class Devices:
    """Where a member of a group computes, and how the members communicate."""

    backend: str  #: of the process group, "gloo" or "nccl"
    device: str  #: of this member
    why: str  #: the reason for both, to be printed


def devices(
    rank: int, world_size: int, gpus: Sequence[str], ddp_only: bool = False
) -> Devices:
    """Choose for one member, given all GPUs; NCCL refuses two members on one of them.

    Then the backend is gloo. It exchanges a GPU's tensors for DDP only, so shards and
    stages compute on the CPU.
    """
    if not gpus:
        return Devices("gloo", "cpu", "gloo: no GPU is used")
    device = gpus[rank % len(gpus)]
    if world_size <= len(gpus):
        return Devices("nccl", device, "nccl: each rank has a GPU of its own")
    why = f"gloo: {world_size} ranks for {len(gpus)} GPU(s)"
    if ddp_only:
        return Devices("gloo", device, why)
    return Devices("gloo", "cpu", f"{why}, and shards and stages stay on the CPU")


def join(rank: int, world_size: int, gpus: Sequence[str], **choice: Any) -> Devices:
    """Join the default process group, until the process ends; called by each member.

    The arguments are those of :func:`devices`, which chooses.
    """
    # Destroying it after an all-reduce hangs at times: it waits for gloo with the GIL.
    if dist.is_initialized():  # by an earlier run of this process, under torchrun
        dist.destroy_process_group()
    chosen = devices(rank, world_size, gpus, **choice)
    if chosen.device != "cpu":
        torch.cuda.set_device(chosen.device)  # else all meshes and NCCL take the first
    place = {"rank": rank, "world_size": world_size} | group_options(world_size)
    dist.init_process_group(chosen.backend, **place)
    return chosen
