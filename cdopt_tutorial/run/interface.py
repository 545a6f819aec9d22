"""The network device that workers on several hosts listen on."""

import os
import socket

import psutil

from cdopt_tutorial.torchrun import Unfit

VARIABLE = "CDOPT_TUTORIAL_INTERFACE"  # names the device


def interface(host: str) -> str:
    """The device that leads to a host, or the one that the variable names.

    ``Unfit`` if there is no device of that name.
    """
    if named := os.environ.get(VARIABLE):
        return device(named)
    family, kind, *_, first = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
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
