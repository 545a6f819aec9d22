"""The device to compute on: what is asked for, checked against what is there."""

import re

import torch
from torch import nn

_NAMES = re.compile(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?")


def pick_device(wish: str) -> str:
    """Turn a wish into the device that is used: "cpu", "cuda", or a GPU by its number.

    It takes no memory on a GPU. "auto" is "cuda" if there is a GPU, else "cpu"; "cuda"
    is whichever GPU torch takes, or all of them where a system shares them out.
    Anything that is not here is a ValueError.
    """
    if wish == "auto":
        return "cuda" if gpus_of("cuda") else "cpu"
    if not _NAMES.fullmatch(str(wish)):
        raise ValueError(f"device is {wish!r}, but must be auto, cpu, cuda or cuda:N")
    if wish != "cpu" and not gpus_of(wish):
        raise ValueError(f"device is {wish!r}, but {_what_is_there()}")
    return wish


def gpus_of(device: str) -> tuple[str, ...]:
    """The GPUs here that a device stands for, to share out: all for "cuda"."""
    # Torch counts the GPUs of a driver that is too old for it as well.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = tuple(f"cuda:{number}" for number in range(count))
    return here if device == "cuda" else tuple(gpu for gpu in here if gpu == device)


def device_for(device: str, worker: int) -> str:
    """The device of one of a system's workers, by its number; asked on that worker.

    Workers share out the GPUs that a device stands for, one after the other. Where it
    stands for none, as "cpu", it is itself.
    """
    gpus = gpus_of(device)
    return gpus[worker % len(gpus)] if gpus else device


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next(module.parameters()).device


def wait_for(device: str | torch.device) -> None:
    """Wait until a GPU has done all that it was given; to be timed, it must have."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _what_is_there() -> str:
    if not torch.backends.cuda.is_built():
        return "this torch is a build without CUDA"
    here = gpus_of("cuda")
    if len(here) > 1:
        return f"the GPUs are {here[0]} to {here[-1]}"
    return "the only GPU is cuda:0" if here else "torch sees no GPU"
