"""What a step on one of several ranks sends by collectives, and allocates."""

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import profile
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Which argument of each is the tensor that is counted.
SENDS = {
    "c10d::allreduce_": 0, "_c10d_functional::all_reduce": 0,
    "_c10d_functional::all_gather_into_tensor": 0,
    "c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 0,  # FSDP2's
}  # fmt: skip
EXCHANGE = "c10d::alltoall_base_"
SILENT = "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"


class Sent(TorchDispatchMode):
    """Counts collectives, and the bytes of the tensors that this rank gives them.

    With two ranks these are the bytes sent: of S bytes on k ranks, a ring's all-reduce
    sends 2 S (k - 1) / k from each, an all-gather S (k - 1). Of a reduce-scatter the
    result counts, S / k, and of an all-to-all what a rank does not keep.
    NotImplementedError for any other collective.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.collectives = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first DTensor turns it into calls on local parts
        name = func.name().partition(".")[0]
        if name in SENDS:
            given = args[SENDS[name]]
            given = given if isinstance(given, list) else [given]
            self.bytes += sum(each.nbytes for each in given)
            self.collectives += 1
        elif name == EXCHANGE:
            _, given, group, _, numbers, *_ = args
            kept = numbers[ProcessGroup.unbox(group).rank()]
            self.bytes += (sum(numbers) - kept) * given.itemsize
            self.collectives += 1
        elif "c10d" in name and name not in SILENT:
            raise NotImplementedError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


def peak_memory(step: Callable[[], object]) -> int:
    """The most bytes that a step holds at a time, beyond those at its start.

    They are what torch allocates on the CPU, including temporaries within operators but
    not gloo's own buffers.
    """
    used = peak = 0
    with profile(profile_memory=True) as profiled:
        step()
    for event in profiled.kineto_results.events():
        if event.name() == "[memory]":
            used += event.nbytes()
            peak = max(peak, used)
    return peak
