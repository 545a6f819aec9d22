"""The device to compute on: what is asked for, checked against what is there."""

import re
from collections.abc import Mapping

import torch

DeviceMaps = Mapping[str, Mapping[str, str]]
"""By the name of a peer: a device of one's own, and the peer's that stands for it."""

_GPU = re.compile(r"cuda:(0|[1-9][0-9]{0,3})")


def pick_device(wish: str) -> str:
    """Turn a wish into the device that is used.

    Called by the configs and the commands, in the parent, before any process starts.
    No memory is taken on a GPU.

    Args:
        wish: "cpu"; "cuda:1", a GPU by its number; "cuda", whichever GPU torch takes,
            or all of them where a system shares them out; "auto", which is "cuda" if
            there is a GPU, and "cpu" otherwise.

    Returns:
        "cpu", "cuda", or a GPU by its number.

    Raises:
        ValueError: there is no such device here, or it is none of these names.
    """
    if wish == "auto":
        return "cuda" if num_gpus() else "cpu"
    if wish not in ("cpu", "cuda") and not _names_a_gpu(wish):
        allowed = "auto, cpu, cuda or cuda:N"
        raise ValueError(f"device is {wish!r}, but must be {allowed}")
    if wish != "cpu" and not gpus_of(wish):
        raise ValueError(f"device is {wish!r}, but {_what_is_there()}")
    return wish


def gpus_of(device: str) -> tuple[str, ...]:
    """The GPUs here that a device stands for: all for "cuda", none for "cpu".

    Called on the workers that share them out.

    Args:
        device: as :func:`pick_device` returns it.
    """
    here = tuple(f"cuda:{number}" for number in range(num_gpus()))
    return here if device == "cuda" else tuple(gpu for gpu in here if gpu == device)


def num_gpus() -> int:
    """How many GPUs this process can use."""
    # Torch counts the GPUs of a driver that is too old for it as well.
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_device_maps(device_maps: Mapping[str, DeviceMaps]) -> None:
    """See whether the workers of a run could pass tensors by these maps.

    Called by :func:`~cdopt_tutorial.engines.launch.launch`. Torch would see it only
    when all workers have started.

    Args:
        device_maps: each worker's, by its name.

    Raises:
        ValueError: a map is to nobody, has a device that is not there, or is not
            one-to-one.
    """
    for worker, maps in device_maps.items():
        for peer, own_to_peers in maps.items():
            told = f"the device map of {worker} to {peer}"
            if peer not in device_maps:
                known = ", ".join(device_maps)
                raise ValueError(f"{told} is to none of the workers {known}")
            for device in (*own_to_peers, *own_to_peers.values()):
                _check_mapped(told, device)
            if len(set(own_to_peers.values())) < len(own_to_peers):
                raise ValueError(
                    f"{told} is {dict(own_to_peers)}, but must be one-to-one"
                )


def _check_mapped(told: str, device: str) -> None:
    if device != "cpu" and not _names_a_gpu(device):
        raise ValueError(f"{told} has {device!r}, but must have cpu or cuda:N")
    if device != "cpu" and not gpus_of(device):
        raise ValueError(f"{told} has {device!r}, but {_what_is_there()}")


def _names_a_gpu(device: object) -> bool:
    return isinstance(device, str) and _GPU.fullmatch(device) is not None


def _what_is_there() -> str:
    if not torch.backends.cuda.is_built():
        return "this torch is a build without CUDA"
    count = num_gpus()
    if count < 2:
        return "the only GPU is cuda:0" if count else "torch sees no GPU"
    return f"the GPUs are cuda:0 to cuda:{count - 1}"
