"""What torchrun tells each process that it starts, through the environment.

Torch is not imported here, since a command needs this before its slow imports.
"""

import ctypes
import os
import signal

INTERFACE = "CDOPT_TUTORIAL_INTERFACE"  # names the device that workers listen on


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
