"""Where workers of several hosts meet: in the store that torchrun keeps for them."""

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import psutil
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from cdopt_tutorial.torchrun import Unfit, restarts

INTERFACE = "CDOPT_TUTORIAL_INTERFACE"  # names the network device to listen on
SCHEME = "torchrun"  # of the addresses at which groups meet
PATIENCE = timedelta(seconds=10)  # for an answer of the store


def open_store(path: str) -> Store:
    """A part of torchrun's store, the same for all who name it alike."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The store outlives the processes: those before a restart have left their keys.
    return PrefixStore(f"{restarts()}/{path}", TCPStore(*master, timeout=PATIENCE))


def accept_meetings() -> None:
    """Let torch's groups meet at addresses of ``SCHEME``, in this process."""
    register(SCHEME, lambda place, group: open_store(place + group))


def register(scheme: str, open_place: Callable[[str, str], Store]) -> None:
    """Let torch's groups meet at ``scheme://place/group``, in the store of the two."""

    def meet(address: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
        url = urlparse(address)
        numbers = parse_qs(url.query)
        store = open_place(url.netloc, url.path)
        yield store, int(numbers["rank"][0]), int(numbers["world_size"][0])

    dist.register_rendezvous_handler(scheme, meet)


def interface() -> str:
    """The device by which this host reaches the first one, or the one that is named.

    Raises ``Unfit`` if there is no device of that name.
    """
    if named := os.environ.get(INTERFACE):
        return device(named)
    address = (os.environ["MASTER_ADDR"], 1)
    family, kind, *_, first = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as end:
        end.connect(first)  # sends nothing, but chooses an address of this host
        return device_of(end.getsockname()[0])


def device(name: str) -> str:
    """The name of a device of this host; ``Unfit`` if there is none of that name."""
    devices = psutil.net_if_addrs()
    if name not in devices:
        known = ", ".join(sorted(devices))
        raise Unfit(f"interface is {name!r}, but must be one of {known}")
    return name


def device_of(address: str) -> str:
    """The device of this host that has an address."""
    devices = psutil.net_if_addrs().items()
    return next(name for name, has in devices if address in [a.address for a in has])
