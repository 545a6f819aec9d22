"""How processes are started: forked from a server that no interrupt reaches."""

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

from cdopt_tutorial import own_network, scratch

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
MOMENT = 0.3  # seconds in which a server that was killed has ended

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
    with _as_workers_need(scratch.of_process(os.getpid())):
        forkserver.ensure_running()
        start_all()


@contextmanager
def _as_workers_need(folder: str) -> Iterator[None]:
    """The server makes its socket in this folder, and removes it should we be killed.

    And processes that are started here do not run the parent's script once more.
    """
    config = multiprocessing.current_process()._config
    before, prepared = dict(config), spawn.get_preparation_data

    def prepare(name: str) -> dict[str, Any]:
        data = prepared(name)
        return {key: data[key] for key in data if not key.startswith("init_main")}

    config["tempdir"], spawn.get_preparation_data = _short(folder), prepare
    os.environ[scratch.VARIABLE] = folder
    try:
        yield
    finally:
        config.clear()
        config.update(before)
        spawn.get_preparation_data = prepared
        del os.environ[scratch.VARIABLE]


@functools.cache
def _short(folder: str) -> str:
    """A folder's path as short as a socket's must be, which this process alone has."""
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def end_server() -> None:
    """End the fork server, even one that is stopped; the next run starts a new one."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def server_ends() -> bool:
    """Whether the fork server has ended, or does so within a moment."""
    time.sleep(MOMENT)
    seen = os.WEXITED | os.WNOHANG | os.WNOWAIT  # not reaped, which Python will do
    return os.waitid(os.P_PID, forkserver._forkserver._forkserver_pid, seen) is not None


def check_network(pid: int) -> None:
    """Warn, once, if a worker is in the machine's network, and not by choice."""
    if os.environ.get(own_network.VARIABLE) == "host":
        return
    with suppress(OSError):  # it has ended, or its user may not know
        if os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
            _warn()


@functools.cache  # once, whatever becomes of the filters of warnings
def _warn() -> None:
    text = "workers share this machine's network: see the page 'Who can reach a run'"
    warnings.warn(text, stacklevel=1)
