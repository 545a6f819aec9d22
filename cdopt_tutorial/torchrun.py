"""What torchrun tells each process that it starts, through the environment.

Torch is not imported here, since a command needs this before its slow imports.
"""

import ctypes
import os
import signal
from collections.abc import Sequence


def is_here() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def enter() -> None:
    """Have this process terminated when torchrun is killed, if that has started it."""
    if is_here():
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of prctl(2)
        # Or calls to a store that is gone bury the worker's name in stacks of C++.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def is_first() -> bool:
    """Whether this process prints and writes the results of the run."""
    return not is_here() or os.environ["RANK"] == "0"


def restarts() -> int:
    """How often torchrun has restarted all processes, after one had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_here() else 0


class Unfit(ValueError):
    """How torchrun was started, or its environment, does not fit a run."""


def own_worker(names: Sequence[str]) -> str:
    """The worker of this process; ``Unfit`` unless each process has one."""
    world_size = int(os.environ["WORLD_SIZE"])
    if len(names) != world_size:
        workers = f"{len(names)} workers, {', '.join(names)}"
        started = f"torchrun has started {world_size} processes"
        raise Unfit(f"{started}, but this run has {workers}")
    return names[int(os.environ["RANK"])]
