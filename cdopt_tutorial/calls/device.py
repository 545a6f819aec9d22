"""The device to compute on: what is requested, checked against what there is."""

import re

import torch
from torch import Tensor, nn


def pick_device(wish: str) -> str:
    """The device for a wish: "cpu", "cuda", or a GPU by its number, as "cuda:1".

    "auto" is "cuda" if there is a GPU, else "cpu". "cuda" is whichever GPU torch takes,
    or all of them where a system shares them out. ValueError if there is none such. It
    takes no memory on a GPU.
    """
    if wish == "auto":
        return "cuda" if gpus_of("cuda") else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(wish)):
        raise ValueError(f"device is {wish!r}, but must be auto, cpu, cuda or cuda:N")
    if wish != "cpu" and not gpus_of(wish):
        count = len(gpus_of("cuda"))
        raise ValueError(f"device is {wish!r}, but torch sees {count} GPU(s)")
    return wish


def gpus_of(device: str) -> tuple[str, ...]:
    """The GPUs of this host that a device stands for: all for "cuda"."""
    # Torch also counts GPUs whose driver is too old for it.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = tuple(f"cuda:{number}" for number in range(count))
    return here if device == "cuda" else tuple(gpu for gpu in here if gpu == device)


def device_for(device: str, worker: int) -> str:
    """The device of a system's worker, by its number; called on that worker.

    Workers share out the GPUs that a device stands for. One that stands for none, such
    as "cpu", is everybody's.
    """
    gpus = gpus_of(device)
    return gpus[worker % len(gpus)] if gpus else device


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next(module.parameters()).device


def weights_of(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Copies on the CPU of a module's parameters, by name, after a prefix."""
    state = module.state_dict(prefix=prefix).items()
    return {name: weight.to("cpu", copy=True) for name, weight in state}


def wait_for(device: str | torch.device) -> None:
    """Wait until a GPU has done all its work, so that it can be timed."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
