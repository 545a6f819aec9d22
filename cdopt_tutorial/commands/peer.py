"""Two hosts whose doctors call each other: whether workers could, and how fast.

Each tells whoever asks at a port who it is, and asks the other. Then a process on each
joins groups of torch RPC and gloo as a worker does; one of the two has the store.
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
from cdopt_tutorial.engines.torchrun.store import INTERFACE, TORCHRUN

MOMENT, TRIAL = 1.0, 3.0  # seconds for one connection, and for torch

Host = dict[str, Any]  # its name, interface, address, port of a store, versions


def resolve(name: str, seconds: float = 2.0) -> str:
    """A host's address; a ValueError if its name leads to none in so many seconds."""
    with ThreadPool(1) as pool:  # since the look-up has no time-out
        look = pool.apply_async(socket.getaddrinfo, (name, 0, 0, socket.SOCK_STREAM))
        with suppress(OSError, UnicodeError, multiprocessing.TimeoutError):
            return look.get(seconds)[0][4][0]
    raise ValueError(f"{name} has no address: add it to /etc/hosts, or give an address")


def examine(
    name: str, there: str, interface: str, port: int, limit: float, versions: str
) -> tuple[Host, float, float]:
    """Who a peer is, and the milliseconds of a call and of an all-reduce with it.

    A ValueError, or an OSError, says why a run would fail.
    """
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    addresses = psutil.net_if_addrs()[interface]
    own = next((each.address for each in addresses if each.family == family), "")
    listen = partial(socket.create_server, family=family)
    with listen(("", port)) as door, listen((own, 0)) as store:
        here = {"name": socket.gethostname(), "interface": interface, "address": own}
        here |= {"store": store.getsockname()[1], "versions": versions}
        asked = threading.Event()
        told = door, here, asked
        threading.Thread(target=_answer, args=told, daemon=True).start()
        who = name if name == there else f"{name} ({there})"
        other = _meet(who, there, port, here, limit)
        asked.wait(MOMENT)  # or the other would miss one who has given up
        return other, *_try_torch(here, other, store.fileno())


def _answer(door: socket.socket, here: Host, asked: threading.Event) -> None:
    with suppress(OSError):  # the door has been closed
        while True:
            with door.accept()[0] as asking, suppress(OSError):
                asking.sendall(json.dumps([*here.values()]).encode())
            asked.set()


def _meet(who: str, address: str, port: int, here: Host, limit: float) -> Host:
    while True:
        why = f"no doctor answers on {who}: start it there too, both with --wait 60"
        try:
            with socket.create_connection((address, port), MOMENT) as asked:
                # Unless another program is there.
                with suppress(TimeoutError, ValueError, TypeError):
                    told = json.loads(asked.makefile("rb").read(10_000))
                    other = dict(zip(here, told, strict=True))
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


def _try_torch(here: Host, other: Host, store: int) -> list[float]:
    """What a call and an all-reduce take, in a process that can be given up."""
    with multiprocessing.get_context("fork").Pool(1, _become_worker) as pool:
        with suppress(Exception):
            return pool.apply_async(_work, (here, other, store)).get(TRIAL)
    ends = [f"{host['interface']} ({host['address']})" for host in (here, other)]
    way = f"torch does not get from {ends[0]} to {ends[1]} on {other['name']}"
    cure = f"choose the interface by {INTERFACE}, or open all TCP ports"
    raise ValueError(f"{way}: {cure}")


def _become_worker() -> None:
    """End with the doctor, or when it says so; let nobody see what torch says."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)


def _work(here: Host, other: Host, store: int) -> list[float]:
    """Join both groups as workers do; the first host's process keeps the store."""
    first = min(here, other, key=lambda host: host["address"])
    rank, place = int(first != here), (first["address"], first["store"])
    if rank == 0:
        alone = {"is_master": True, "wait_for_workers": False}
        kept = dist.TCPStore(*place, **alone, master_listen_fd=store)  # noqa: F841
    os.environ |= {"MASTER_ADDR": place[0], "MASTER_PORT": str(place[1])}
    settings = process.Settings(
        world_size=2, folder="", init_method=f"{TORCHRUN}://doctor",
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
    dist.barrier()  # the other may not be done
    return times
