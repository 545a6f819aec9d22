"""What runs inside a worker: join the others, play the role, report to the parent.

The role comes in a file. Through a pipe go the worker's phase, what it reports, and at
last its result, or the error with which it failed; through others, what it prints.
"""

import base64
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.multiprocessing import _prctl_pr_set_pdeathsig, _set_thread_name

from cdopt_tutorial import scratch
from cdopt_tutorial.calls import network
from cdopt_tutorial.calls.errors import describe, has_lost_peer
from cdopt_tutorial.probes import trace, wire
from cdopt_tutorial.run import pack

LOOPBACK = "lo"
ASK = b"?"  # of the parent: whom does this worker wait for?


@dataclass(frozen=True)
class Role:
    """What one worker does: a function and its arguments, which are pickled."""

    #: from a module that the worker can import, or from the notebook or script.
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_threads: int = 1  #: threads of torch's operators in this worker


@dataclass(frozen=True)
class Settings:
    """What all workers of a run need in order to join it; see ``launch``."""

    world_size: int
    folder: str  # the run's own, which only this user can read
    rpc_timeout: float
    rpc_threads: int
    polling: bool
    modules: tuple[str, ...]  # that any role needs; every worker imports them first
    traced: bool
    counted: bool
    path: list[str]  # where modules are looked for
    environment: Mapping[str, str]
    init_method: str = ""  # the address at which groups form, if not a file
    interface: str = LOOPBACK  # the network device that workers listen on

    def file(self, worker: str, kind: str) -> Path:
        """A worker's file: its "role", or the "log" of its libraries."""
        return Path(self.folder, f"{worker}.{kind}")


class Channel:
    """The worker's end of the pipe to its parent, for several threads.

    Each message is a line, so that the reader sees where it ends.
    """

    def __init__(self, connection: Connection):
        self._lock = threading.Lock()
        self._file = open(connection.fileno(), "wb", closefd=False)

    def send(self, kind: str, *content: Any) -> None:
        # With multiprocessing's own pickler, torch would pass tensors as file
        # descriptors, which die with the sender.
        line = base64.b64encode(pickle.dumps((kind, *content))) + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()


# Of this worker: how it reports, and where a group of so many members forms.
_report: Callable[[Any], None] | None = None
_open_store: Callable[[int], dist.Store] | None = None
_limit: dict[str, timedelta] = {}  # of a group's collectives


def serve() -> None:
    """A role that only answers calls, until all roles are done."""


def report(record: Any) -> None:
    """Send ``on_report`` a record, which must pickle.

    Outside workers, and in a run within ``alone``, it does nothing.
    """
    if _report is not None and network.current().own_name():
        _report(record)


def meeting(world_size: int) -> dict[str, Any]:
    """Where a process group forms, and its time-out, for ``init_process_group``.

    Nothing in a process that was not launched: it takes them from the environment.
    """
    if _open_store is None:
        return {}
    return {"store": _open_store(world_size)} | _limit


def enter(
    report: Callable[[Any], None],
    open_store: Callable[[int], dist.Store],
    timeout: float,
) -> None:
    """Make this process a worker: how it reports, and a store in which groups form."""
    global _report, _open_store, _limit
    _report, _open_store = report, open_store
    _limit = {"timeout": timedelta(seconds=timeout)} if timeout else {}


def load(settings: Settings, packed: bytes) -> Role:
    """A worker's role, once its modules are imported and ``attach`` has been called."""
    sys.path[:] = settings.path
    # Imports come before the first call: two threads that import at once, to answer
    # calls, can get in each other's way.
    for module in settings.modules:
        importlib.import_module(module)
    attach, role = pack.unpack(packed)
    torch.set_num_threads(role.num_threads)
    if attach is not None:
        attach()
    return role


def play(role: Role) -> bytes:
    """Run a role; return its result, pickled."""
    torch.set_num_threads(role.num_threads)  # an actor calls `load` in another thread
    return pack.dumps(role.function(*role.args, **role.kwargs))


def main(
    settings: Settings, name: str, rank: int, pipes: tuple[Connection, ...]
) -> None:
    """Entry point of a worker process; called by the launcher only."""
    control, *texts = pipes
    channel = Channel(control)
    _set_thread_name(name)  # as `top` and `ps` show it
    _leave_with_parent(control, channel)
    # Its path leads through an open file of the parent's.
    multiprocessing.current_process()._config.pop("tempdir", None)
    multiprocessing.set_start_method("fork", force=True)  # as in any other process
    _take_environment(settings.environment)
    try:
        _log_output(settings.file(name, "log"))
        folder = scratch.short(settings.folder)
    except FileNotFoundError:  # the parent is ending, and its folder is gone
        os._exit(1)
    sys.stdout, sys.stderr = (open(os.dup(t.fileno()), "w", 1) for t in texts)
    enter(
        lambda record: channel.send("report", pack.dumps(record)),
        lambda world_size: dist.FileStore(f"{folder}/members", world_size),
        settings.rpc_timeout,
    )
    try:
        settings = replace(settings, init_method=f"file://{folder}/rendezvous")
        packed = settings.file(name, "role").read_bytes()
        _play(settings, name, rank, packed, channel.send)
    except BaseException as error:  # the parent decides what becomes of it
        channel.send("failed", describe(name, error), has_lost_peer(error))
    sys.stdout.flush()
    sys.stderr.flush()


def _play(
    settings: Settings, name: str, rank: int, packed: bytes, send: Callable[..., None]
) -> None:
    """Run the role, among the others."""
    if settings.traced:
        trace.begin(name)
    role = load(settings, packed)
    send("phase", "joining")
    join(settings, name, rank)
    send("phase", "running")
    result = play(role)
    send("phase", "serving")
    received = wire.count() if settings.counted else None
    rpc.shutdown()
    sys.stdout.flush()  # of calls answered meanwhile, too
    sys.stderr.flush()
    send("result", result, trace.collect(), received)


def _leave_with_parent(control: Connection, channel: Channel) -> None:
    """End this process, and what it starts, when the parent ends; answer it till then.

    The answer says whose calls this worker runs, and whom it waits for.
    """
    os.setpgid(0, 0)
    # Linux kills us with the fork server, even if we are stopped. The server ends with
    # the parent, as long as nobody else holds its "alive" pipe.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)
    forkserver._forkserver._forkserver_alive_fd = None
    sentinel = multiprocessing.parent_process().sentinel

    def watch() -> None:
        while sentinel not in wait([sentinel, control.fileno()]):
            if os.read(control.fileno(), 1) != ASK:
                break
            others = list(network.answers.values()), list(network.waits.values())
            channel.send("busy", *others)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _take_environment(environment: Mapping[str, str]) -> None:
    """Take the parent's variables as they are now, not as at the fork server's start.

    But one thread, unless a role asks for more: ``torch.set_num_threads`` affects only
    the thread that calls it, and each call is answered in a new one.
    """
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")


def _log_output(path: Path) -> None:
    """Write what C++ libraries print to the worker's log, and stacks on SIGUSR1."""
    log = open(path, "w")  # noqa: SIM115 (open as long as the process lives)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)


def join(settings: Settings, name: str, rank: int) -> None:
    """Join the RPC group, listening on one network device only."""
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ[variable] = settings.interface
    # A warning of torch's at each ``init_rpc``, about its own use of its own class.
    text = "You are using a Backend .* as a ProcessGroup"
    warnings.filterwarnings("ignore", message=text)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=settings.init_method,
        rpc_timeout=settings.rpc_timeout or network.LONGEST,
        num_worker_threads=settings.rpc_threads,
        # None means shared memory, the fastest. Sockets don't poll, and count bytes.
        _transports=None if settings.polling else ["uv"],
        _channels=None if settings.polling else ["basic"],
    )
    rpc.init_rpc(name, None, rank, settings.world_size, options)
