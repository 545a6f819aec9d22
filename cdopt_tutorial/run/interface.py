"""The network device that a worker listens on, for workers on other hosts."""

import socket

import psutil

VARIABLE = "CDOPT_TUTORIAL_INTERFACE"  # names the device, under torchrun


def interface(host: str, named: str | None = None) -> str:
    """The device that leads to a host, unless one is named.

    A ValueError if this host has none of that name.
    """
    devices = psutil.net_if_addrs()
    if named:
        if named not in devices:
            known = ", ".join(sorted(devices))
            raise ValueError(f"interface is {named!r}, but must be one of {known}")
        return named
    family, kind, *_, first = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as end:
        end.connect(first)  # sends nothing, only chooses an address of this host
        own = end.getsockname()[0]
    return next(n for n, has in devices.items() if own in [a.address for a in has])
