"""How processes are started: forked from a server that no interrupt reaches.

In goes a function that starts them, out comes a future; ``group`` ends the server where
it does not answer.
"""

import functools
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any

import psutil

from cdopt_tutorial.own_network import VARIABLE
from cdopt_tutorial.scratch import of_process

# Imported once for all workers; not our own systems, which a reader may edit.
PRELOAD = (
    "cdopt_tutorial.fork_server",  # first: it needs a process without threads
    "torch.distributed.rpc",
    "torch.distributed.optim",
    "torch._dynamo",  # whoever makes an optimizer imports it, in a second
    "gymnasium.envs.classic_control",
    "cdopt.nn",
    "cloudpickle",
    "cdopt_tutorial.engines.launcher.process",
)

UNKNOWN = 255  # the exit code of who was forked, where the server can't tell it
MOMENT = 1.0  # seconds in which a server that was killed has ended

CONTEXT = multiprocessing.get_context("forkserver")


def start(start_all: Callable[[], None]) -> Future:
    """Start processes in a thread of their own, which a server that is stopped holds.

    An interrupt in between would leave a start half done.
    """
    CONTEXT.set_forkserver_preload(list(PRELOAD))
    thread = ThreadPoolExecutor(1)
    starting = thread.submit(_start, start_all)
    thread.shutdown(wait=False)
    return starting


def _start(start_all: Callable[[], None]) -> None:
    resource_tracker.ensure_running()  # it would unblock them again
    # What this thread starts hears no Ctrl-C, nor a kernel's interrupt: we answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # To start a process starts the server again, if that has been ended meanwhile.
    with _as_workers_need(of_process(os.getpid())):
        forkserver.ensure_running()
        start_all()


@contextmanager
def _as_workers_need(folder: str) -> Iterator[None]:
    """The server's socket is made in a folder that is swept should we be killed.

    And processes that are started here do not run the parent's script once more.
    """
    config = multiprocessing.current_process()._config
    before, prepared = dict(config), spawn.get_preparation_data

    def prepare(name: str) -> dict[str, Any]:
        data = prepared(name)
        return {key: data[key] for key in data if not key.startswith("init_main")}

    config["tempdir"], spawn.get_preparation_data = folder, prepare
    try:
        yield
    finally:
        config.clear()
        config.update(before)
        spawn.get_preparation_data = prepared


def end_server() -> None:
    """End the fork server, even one that is stopped; the next run starts a new one."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def server_ends() -> bool:
    """Whether the fork server has ended, or does so within a moment."""
    limit = time.monotonic() + MOMENT
    with suppress(psutil.Error):  # it has ended, and is reaped
        server = psutil.Process(forkserver._forkserver._forkserver_pid)
        while server.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > limit:
                return False
            time.sleep(0.02)
    return True


def check_network(pid: int) -> None:
    """Warn, once, if a worker is in the machine's network, and not by choice."""
    if os.environ.get(VARIABLE) != "host" and _network(pid) == _network("self"):
        _warn()


def _network(pid: int | str) -> int | None:
    """Which network a process is in; None if its user may not know."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    return None


@functools.cache  # once
def _warn() -> None:
    text = "workers share this machine's network: see the page 'Who can reach a run'"
    warnings.warn(text, stacklevel=1)
