"""The trainers' process group, in which DDP replicates the dense layer."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from cdopt_tutorial.engines import process_group
from cdopt_tutorial.engines.launcher.process_group import Devices
from cdopt_tutorial.engines.probes import trace
from cdopt_tutorial.engines.watch.pace import place


def join(trainer: int, num_trainers: int, gpus: Sequence[str]) -> Devices:
    """Enter the trainers' process group, until the process ends; once on each."""
    return process_group.join(trainer, num_trainers, gpus, "trainers")


def replicate(layer: nn.Module, device: str) -> DistributedDataParallel:
    """The layer, which is there, as one of its replicas; begins as the first one."""
    ids = [torch.device(device)] if device != "cpu" else None
    replica = DistributedDataParallel(layer, device_ids=ids)
    if trace.recording():
        replica.register_comm_hook(None, _marked_all_reduce)
    return replica


def _marked_all_reduce(
    group: None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """What DDP does by itself, as a span of the trace."""
    reduced = default_hooks.allreduce_hook(group, bucket)
    return trace.mark_until_done("all-reduce", reduced)


def barrier(seconds: float) -> None:
    """Wait until every trainer has come, for so many seconds at most."""
    with place(seconds):
        dist.barrier()


@torch.no_grad()
def ask_difference(layer: nn.Module) -> Callable[[], float]:
    """Ask for the largest difference of any parameter between any two replicas now.

    All trainers must ask. What is returned waits for the answer.
    """
    flat = torch.cat([each.flatten() for each in layer.parameters()])
    both = torch.cat((flat, -flat))
    # To wait would keep trainers in step, which the original's semantics do not.
    work = dist.all_reduce(both, dist.ReduceOp.MAX, async_op=True)

    def answer() -> float:
        work.wait()
        highest, minus_lowest = both.chunk(2)
        return (highest + minus_lowest).max().item()

    return answer
