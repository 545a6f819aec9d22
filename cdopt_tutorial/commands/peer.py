"""Two doctors that call each other: whether workers on their hosts could, how fast.

Each describes itself to whoever connects to its port, and connects to the other's. Then
a process on each host joins groups of torch RPC and gloo, as a worker does; one of the
two serves the store.
"""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from statistics import median
from timeit import repeat
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from cdopt_tutorial.engines.launcher import process, process_group
from cdopt_tutorial.engines.torchrun import store

MOMENT, TRIAL = 1.0, 3.0  # seconds for a connection, and for torch

Host = dict[str, Any]  # its name, interface, address, port of a store, versions


def resolve(name: str, seconds: float = 2.0) -> str:
    """A host's address; a ValueError if the look-up fails or takes longer than that."""
    with ThreadPool(1) as pool:  # since the look-up itself has no time-out
        look = pool.apply_async(socket.getaddrinfo, (name, 0, 0, socket.SOCK_STREAM))
        with suppress(OSError, UnicodeError, multiprocessing.TimeoutError):
            return look.get(seconds)[0][4][0]
    raise ValueError(f"{name} has no address: add it to /etc/hosts, or give an address")


def examine(
    name: str, port: int, limit: float, versions: str
) -> tuple[Host, float, float]:
    """What a peer says of itself; milliseconds of a call and of an all-reduce with it.

    A ValueError or an OSError says why a run would fail.
    """
    there = resolve(name)
    interface = store.interface(there)
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    addresses = psutil.net_if_addrs()[interface]
    own = next((each.address for each in addresses if each.family == family), "")
    listen = partial(socket.create_server, family=family)
    with listen(("", port)) as door, listen((own, 0)) as keeper:
        here = {"name": socket.gethostname(), "interface": interface, "address": own}
        here |= {"store": keeper.getsockname()[1], "versions": versions}
        was_read = threading.Event()
        answer = partial(_answer, door, here, was_read)
        threading.Thread(target=answer, daemon=True).start()
        who = name if name == there else f"{name} ({there})"
        other = _find_peer(who, there, port, here, limit)
        was_read.wait(MOMENT)  # or this doctor might end before the other finds it
        return other, *_try_torch(here, other, keeper.fileno())


def _answer(door: socket.socket, here: Host, was_read: threading.Event) -> None:
    with suppress(OSError):  # the door has been closed
        while True:
            with door.accept()[0] as caller, suppress(OSError):
                caller.sendall(json.dumps([*here.values()]).encode())
            was_read.set()


def _find_peer(who: str, address: str, port: int, here: Host, limit: float) -> Host:
    while True:
        why = f"no doctor answers on {who}: start it there too, both with --wait 60"
        try:
            with socket.create_connection((address, port), MOMENT) as peer:
                # Another program may listen there.
                with suppress(TimeoutError, ValueError, TypeError):
                    values = json.loads(peer.makefile("rb").read(10_000))
                    other = dict(zip(here, values, strict=True))
                    if other != here:
                        return other
                    why = f"{who} is this very host: name the other one"
        except ConnectionRefusedError:
            pass
        except OSError:
            way = f"{who} can't be reached over {here['interface']}"
            why = f"{way}: check the link and firewalls"
        if time.monotonic() > limit:
            raise ValueError(why)
        time.sleep(0.1)


def _try_torch(here: Host, other: Host, keeper: int) -> list[float]:
    """Milliseconds of a call and of an all-reduce, from a process that may hang."""
    with multiprocessing.get_context("fork").Pool(1, _become_worker) as pool:
        with suppress(Exception):
            return pool.apply_async(_work, (here, other, keeper)).get(TRIAL)
    ends = [f"{host['interface']} ({host['address']})" for host in (here, other)]
    way = f"torch does not get from {ends[0]} to {ends[1]} on {other['name']}"
    cure = f"choose the interface by {store.INTERFACE}, or open all TCP ports"
    raise ValueError(f"{way}: {cure}")


def _become_worker() -> None:
    """End with the doctor, or at its SIGTERM; discard what torch prints."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)


def _work(here: Host, other: Host, keeper: int) -> list[float]:
    """Join both groups as workers do; the first host serves the store."""
    first = min(here, other, key=lambda host: host["address"])
    rank, place = int(first != here), (first["address"], first["store"])
    if rank == 0:
        alone = {"is_master": True, "wait_for_workers": False}
        kept = dist.TCPStore(*place, **alone, master_listen_fd=keeper)  # noqa: F841
    os.environ |= {"MASTER_ADDR": place[0], "MASTER_PORT": str(place[1])}
    settings = process.Settings(
        world_size=2, folder="", init_method=f"{store.TORCHRUN}://doctor",
        interface=here["interface"], rpc_timeout=60.0, rpc_threads=4, polling=False,
        modules=(), traced=False, counted=False,
    )  # fmt: skip
    process.enter(settings, None)
    process.join(settings, f"host{rank}", rank)
    process_group.join(rank, 2, ())
    numbers = torch.ones(2**12)  # 16 kB
    ways = (
        lambda: rpc.rpc_sync(f"host{1 - rank}", os.getpid),
        lambda: dist.all_reduce(numbers),
    )
    times = [1e3 * median(repeat(way, number=1, repeat=5)) for way in ways]
    dist.barrier()  # the other may still be measuring
    return times
