"""Stores in which process groups form that can't use a file, and network devices.

The address ``torchrun://path/group`` is in the store that torchrun keeps for all hosts,
and ``network://worker/group`` in one that a worker keeps for all that can call it.
"""

import functools
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import psutil
import torch.distributed as dist

from cdopt_tutorial.engines.seam import network
from cdopt_tutorial.torchrun import Unfit, restarts

INTERFACE = "CDOPT_TUTORIAL_INTERFACE"  # names the network device to listen on
TORCHRUN, NETWORK = "torchrun", "network"  # the schemes
PATIENCE = timedelta(seconds=10)  # for an answer of torchrun's store


def open_store(path: str) -> dist.Store:
    """The part of torchrun's store under a path."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The store outlives the processes, and those before a restart have left keys in it.
    store = dist.TCPStore(*master, timeout=PATIENCE)
    return dist.PrefixStore(f"{restarts()}/{path}", store)


class NetworkStore(dist.Store):
    """Does what torch's TCPStore does, but by calls to a worker, and opens no port."""

    def __init__(self, keeper: str):
        super().__init__()
        self._keeper = keeper

    def _call(self, method: str, *args: Any) -> Any:
        here = network.current()
        if here.own_name() == self._keeper:
            return _call_kept(method, *args)
        # Without a limit, since the keeper's store has its own timeout.
        return here.call(self._keeper, _call_kept, (method, *args), {}, 0)

    # What torch calls.
    set = functools.partialmethod(_call, "set")
    get = functools.partialmethod(_call, "get")
    add = functools.partialmethod(_call, "add")
    check = functools.partialmethod(_call, "check")
    wait = functools.partialmethod(_call, "wait")


_kept = dist.HashStore()  # if this process is the keeper


def _call_kept(method: str, *args: Any) -> Any:
    return getattr(_kept, method)(*args)


# Torch holds the C++ part of a store only, and Python would free ours.
_store_of = functools.cache(NetworkStore)


@functools.cache  # torch refuses a scheme that it has
def register_schemes() -> None:
    """Let torch's groups form at addresses of both schemes, in this process."""
    _register(TORCHRUN, lambda run, group: open_store(run + group))
    _register(NETWORK, lambda keeper, path: dist.PrefixStore(path, _store_of(keeper)))


def _register(scheme: str, open_path: Callable[[str, str], dist.Store]) -> None:
    """Let groups form at ``scheme://host/path``, in the store opened for the two."""

    def handle(address: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        url = urlparse(address)
        numbers = parse_qs(url.query)
        store = open_path(url.netloc, url.path)
        yield store, int(numbers["rank"][0]), int(numbers["world_size"][0])

    dist.register_rendezvous_handler(scheme, handle)


def interface() -> str:
    """The network device that leads to torchrun's first host, or that of ``INTERFACE``.

    ``Unfit`` if there is no device of the name in that variable.
    """
    if named := os.environ.get(INTERFACE):
        return device(named)
    master = os.environ["MASTER_ADDR"], 1
    family, kind, *_, first = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as end:
        end.connect(first)  # sends nothing, only chooses an address of this host
        return device_of(end.getsockname()[0])


def device(name: str) -> str:
    """The name, if this host has such a network device; else ``Unfit``."""
    devices = psutil.net_if_addrs()
    if name not in devices:
        known = ", ".join(sorted(devices))
        raise Unfit(f"interface is {name!r}, but must be one of {known}")
    return name


def device_of(address: str) -> str:
    """The network device of this host that has an address."""
    devices = psutil.net_if_addrs().items()
    return next(name for name, has in devices if address in [a.address for a in has])
