"""What a step on one of several ranks sends by collectives, and allocates."""

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Each is given the tensor that it sends as its first argument.
SENDS = "c10d::allreduce_", "_c10d_functional::all_gather_into_tensor"
SILENT = "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"


class Sent(TorchDispatchMode):
    """Counts collectives, and as bytes those of the tensors that this rank gives them.

    With two ranks that is what crosses the wire: of S bytes on k ranks, a ring's
    all-reduce sends 2 S (k - 1) / k each, and an all-gather S (k - 1). Raises
    NotImplementedError for collectives other than these two.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.collectives = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first it does what it does with its parts
        name = func.name().partition(".")[0]
        if name in SENDS:
            given = args[0] if isinstance(args[0], list) else [args[0]]
            self.bytes += sum(each.nbytes for each in given)
            self.collectives += 1
        elif "c10d" in name and name not in SILENT:
            raise NotImplementedError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


def peak_memory(step: Callable[[], None]) -> int:
    """The most bytes that a step holds at a time beyond those held at its start.

    They are what torch gives out on the CPU, temporaries within operators included;
    gloo's own buffers are not.
    """
    used = peak = 0
    with profile(profile_memory=True) as profiled:
        step()
    for event in profiled.kineto_results.events():
        if event.name() == "[memory]":
            used += event.nbytes()
            peak = max(peak, used)
    return peak
