"""A run under torchrun: each of its processes plays the role of its rank itself.

Torchrun restarts the processes when one fails, and names that one. Here the workers'
RPC group forms in its store, in which they also leave their results.
"""

import faulthandler
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from cdopt_tutorial import torchrun
from cdopt_tutorial.calls import network
from cdopt_tutorial.calls.errors import WorkerError, describe, has_lost_peer
from cdopt_tutorial.run import pack, worker
from cdopt_tutorial.run.worker import Role, Settings

RENDEZVOUS = "cdopt-tutorial"  # as torch's own by "env", but in a part of the store
_run = 0  # of this process: all make the same ones in the same order
_on_report: Callable[[str, Any], None] | None = None  # of the first process
_one_by_one = threading.Lock()  # reports come in several threads


def play(
    settings: Settings,
    roles: Mapping[str, Role],
    attach: Callable[[], None] | None,
    on_report: Callable[[str, Any], None] | None,
) -> dict[str, tuple]:
    """Play this process's role: what all roles returned, with calls and bytes."""
    global _on_report, _run
    _on_report, _run = on_report, _run + 1
    names, rank = list(roles), int(os.environ["RANK"])
    host, named = os.environ["MASTER_ADDR"], os.environ.get(torchrun.INTERFACE)
    device = worker.interface(host, named)
    store = _agree(names)
    own = names[rank]
    network.enter(network.RPC())  # before it joins, since others may call it at once
    report = partial(_report, names[0])
    worker.enter(own, report, lambda _: _open_store("members"), settings)
    settings = replace(settings, init_method=f"{RENDEZVOUS}://", interface=device)
    load = partial(worker.prepare, attach, roles[own])
    limits = {"joining": settings.join_deadline, "running": settings.deadline}

    def enter_phase(phase: str) -> None:
        if phase in limits:  # then show all stacks and end this process
            seconds = min(limits[phase], threading.TIMEOUT_MAX)
            faulthandler.dump_traceback_later(seconds, exit=True)

    threads = torch.get_num_threads()
    try:
        done = worker.take_part(settings, own, rank, load, enter_phase)
    except BaseException as error:
        if has_lost_peer(error):
            reason = "has lost another worker, which torchrun names"
            raise WorkerError(own, reason, str(error)) from None
        raise describe(own, error) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        torch.set_num_threads(threads)
    store.set(own, pickle.dumps(done))  # type: ignore[arg-type]  # it takes bytes
    return {name: pickle.loads(store.get(name)) for name in names}


def _agree(names: list[str]) -> dist.Store:
    """The store for results, once all processes agree on their workers.

    A ValueError unless each has one, and all list the same in the same order.
    """
    workers, world_size = ", ".join(names), os.environ["WORLD_SIZE"]
    if len(names) != int(world_size):
        raise ValueError(
            f"torchrun has started {world_size} processes, but this run has "
            f"{len(names)} workers, {workers}"
        )
    store = _open_store("results")
    listed = store.compare_set("names", "", workers).decode()  # as whoever came first
    if listed != workers:
        raise ValueError(
            f"this process lists the workers {workers}, but another one {listed}: "
            "all must list the same in the same order"
        )
    return store


def _open_store(part: str) -> dist.Store:
    """A part of torchrun's store that only this run has, and this attempt at it.

    The store outlives the processes: those before a restart have left keys in it, even
    the addresses at which torch's own groups listened.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    path = f"{torchrun.restarts()}/run{_run}/{part}"
    return dist.PrefixStore(path, dist.TCPStore(host, port))


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Where the RPC group forms."""
    yield _open_store("rpc"), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


dist.register_rendezvous_handler(RENDEZVOUS, _rendezvous)


def _report(first: str, _: str, own: str, record: bytes) -> None:
    """Have the run's first process handle a record."""
    if own == first:
        _take(own, record)
    else:
        rpc.rpc_sync(first, _take, (own, record))


def _take(name: str, record: bytes) -> None:
    """Runs in the first process."""
    if _on_report is not None:
        with _one_by_one:
            _on_report(name, pack.loads(name, "reported", record))
