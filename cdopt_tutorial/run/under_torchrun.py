"""A run under torchrun: each of its processes plays the role of its rank itself.

Torchrun restarts the processes when one fails, and names that one. Here the workers'
RPC group forms in its store, in which they also leave their results.
"""

import faulthandler
import json
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
from torch.multiprocessing import _set_thread_name

from cdopt_tutorial import torchrun
from cdopt_tutorial.calls.errors import WorkerError, describe, has_lost_peer
from cdopt_tutorial.calls.references import of_one_run
from cdopt_tutorial.run import pack, worker
from cdopt_tutorial.run.interface import interface
from cdopt_tutorial.run.worker import Role, Settings

LONGEST = 1e6  # seconds that faulthandler can wait
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
    names = list(roles)
    own = torchrun.own_worker(names)
    _set_thread_name(own)  # as `top` and `ps` show this process
    store = _open_store("results")
    _check_names(store, names)
    members = _open_store("members")
    worker.enter(partial(_report, names[0]), lambda _: members, settings)
    device = interface(os.environ["MASTER_ADDR"])
    settings = replace(settings, init_method=f"{RENDEZVOUS}://", interface=device)
    limits = {"joining": settings.join_deadline, "running": settings.deadline}

    def load() -> Role:
        torch.set_num_threads(roles[own].num_threads)
        if attach is not None:
            attach()
        return roles[own]

    def enter_phase(phase: str) -> None:
        if phase in limits:  # then show all stacks and end this process
            seconds = min(limits[phase], LONGEST)
            faulthandler.dump_traceback_later(seconds, exit=True)

    threads = torch.get_num_threads()
    try:
        with of_one_run():  # before it joins, since others may call it at once
            rank = names.index(own)
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
    return {name: _done(name, store.get(name)) for name in names}


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


def _check_names(store: dist.Store, names: list[str]) -> None:
    """A ValueError unless all processes list the same workers in the same order."""
    if torchrun.is_first():
        store.set("names", json.dumps(names))
    if (first := json.loads(store.get("names"))) != names:
        raise ValueError(
            f"this process lists the workers {', '.join(names)}, but the first one "
            f"{', '.join(first)}: all must list the same in the same order"
        )


def _done(name: str, content: bytes) -> tuple:
    result, calls, received = pickle.loads(content)
    return pack.loads(name, "returned", result), calls, received


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
