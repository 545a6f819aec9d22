"""What runs inside a worker: join the others, play the role, report to the parent.

Through a pipe go its phase, what it prints and reports, and at last its result, or the
error with which it failed.
"""

import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.multiprocessing import _set_thread_name
from torch.multiprocessing.spawn import _prctl_pr_set_pdeathsig

from cdopt_tutorial import scratch
from cdopt_tutorial.calls import network
from cdopt_tutorial.calls.errors import describe, has_lost_peer
from cdopt_tutorial.probes import trace, wire
from cdopt_tutorial.run import pack

ASK = b"?"  # of the parent: does this worker wait for others?
Send = Callable[..., None]  # a message: its kind, the worker it is of, its content
OpenStore = Callable[[int], dist.Store]  # in which a group of so many members forms


@dataclass(frozen=True)
class Role:
    """What one worker does: a function and its arguments, which are pickled."""

    #: from a module that the worker can import, or from the notebook or script.
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    num_threads: int = 1  #: threads of torch's operators in this worker


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run and its workers need to know; see ``launch``."""

    world_size: int
    deadline: float
    join_deadline: float
    rpc_timeout: float
    rpc_threads: int
    polling: bool
    traced: bool
    counted: bool
    # Of the process that launches, as they are now.
    path: list[str]
    environment: Mapping[str, str]
    affinity: set[int]
    limits: Mapping[int, tuple[int, int]]
    folder: str = ""  # the run's own, which only this user can read
    modules: tuple[str, ...] = ()  # that any role needs
    init_method: str = ""  # the address at which the workers' group forms
    interface: str = "lo"  # the network device that workers listen on

    def file(self, worker: str, kind: str) -> Path:
        """A worker's file: its "role", or the "log" of its libraries."""
        return Path(self.folder, f"{worker}.{kind}")


def sender(to: Connection) -> Send:
    """How a worker sends to its parent, in any thread; a message follows its length."""
    lock = threading.RLock()

    def send(*message: Any) -> None:
        # With multiprocessing's own pickler, torch would pass tensors as file
        # descriptors, which die with the sender.
        content = pickle.dumps(message)
        rest = memoryview(len(content).to_bytes(8, "big") + content)
        with lock:
            while rest:
                rest = rest[os.write(to.fileno(), rest) :]

    return send


class _Printed(io.BufferedIOBase):
    """A file that sends what is written to it."""

    name = "<worker>"

    def __init__(self, send: Callable[[bytes], None]):
        self._send, self._pid = send, os.getpid()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # the log, for processes that the worker starts

    def write(self, content: Any) -> int:
        if os.getpid() != self._pid:  # a fork of the worker would write in between
            return os.write(1, content)
        self._send(bytes(content))
        return len(content)


# Of this worker.
send: Send | None = None
_open_store: OpenStore | None = None
_patience: float | None = None  # seconds


def serve() -> None:
    """A role that only answers calls, until all roles are done."""


def report(record: Any) -> None:
    """Send ``on_report`` a record, which must pickle.

    Outside workers, and in a run within ``alone``, it does nothing.
    """
    if send is not None and (worker := network.current().own_name()):
        send("report", worker, pickle.dumps(record))


def patience() -> float | None:
    """The run's ``rpc_timeout``; None for never, and where there are no workers."""
    return _patience if network.current().own_name() else None


def group_options(world_size: int) -> dict[str, Any]:
    """A process group's store and time-out, for ``init_process_group``.

    Nothing in a process that was not launched: it takes them from the environment.
    """
    if _open_store is None:
        return {}
    limit = {"timeout": timedelta(seconds=_patience)} if _patience else {}
    return {"store": _open_store(world_size)} | limit


def enter(
    name: str, how_to_send: Send, open_store: OpenStore, settings: Settings
) -> None:
    """Make this process a worker: how it sends, and a store in which groups form."""
    global send, _open_store, _patience
    _set_thread_name(name)  # as `top` and `ps` show it
    send, _open_store = how_to_send, open_store
    _patience = settings.rpc_timeout or None


def print_to(worker: str, send: Send) -> None:
    """Send what this worker prints, as bytes."""
    for stream in "stdout", "stderr":
        file = _Printed(partial(send, stream, worker))
        text = io.TextIOWrapper(file, "utf-8", "replace", write_through=True)
        setattr(sys, stream, text)


def load(settings: Settings, packed: bytes) -> Role:
    """A worker's role, once its modules are imported."""
    sys.path[:] = settings.path
    # Imports come before the first call: two threads that import at once, to answer
    # calls, can get in each other's way.
    for module in settings.modules:
        importlib.import_module(module)
    return prepare(*pack.unpack(packed))


def prepare(attach: Callable[[], None] | None, role: Role) -> Role:
    """A role, before others call this worker."""
    torch.set_num_threads(role.num_threads)
    if attach is not None:
        attach()
    return role


def main(settings: Settings, name: str, rank: int, connection: Connection) -> None:
    """Entry point of a worker process; called by the launcher only."""
    send = sender(connection)
    _leave_with_parent(connection, partial(send, "busy", name))
    multiprocessing.set_start_method("fork", force=True)  # as in any other process
    os.environ.clear()
    # One thread, unless a role asks for more: ``torch.set_num_threads`` affects only
    # the thread that calls it, and each call is answered in a new one.
    os.environ.update(settings.environment, OMP_NUM_THREADS="1")
    os.sched_setaffinity(0, settings.affinity)
    for kind, limits in settings.limits.items():
        resource.setrlimit(kind, limits)
    try:
        log = open(settings.file(name, "log"), "w")
        folder = scratch.short(settings.folder)
    except FileNotFoundError:  # the parent is ending, and its folder is gone
        os._exit(1)
    for descriptor in 1, 2:  # what C++ libraries print
        os.dup2(log.fileno(), descriptor)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    print_to(name, send)
    members = f"{folder}/members"
    enter(name, send, lambda size: dist.FileStore(members, size), settings)
    settings = replace(settings, init_method=f"file://{folder}/rendezvous")
    try:
        packed = settings.file(name, "role").read_bytes()
        role, phase = partial(load, settings, packed), partial(send, "phase", name)
        send("result", name, *take_part(settings, name, rank, role, phase))
    except BaseException as error:  # the parent decides what becomes of it
        send("failed", name, describe(name, error), has_lost_peer(error))


def take_part(
    settings: Settings,
    name: str,
    rank: int,
    load: Callable[[], Role],
    enter_phase: Callable[[str], None],
) -> tuple:
    """Play a role: the result, pickled, recorded calls, and bytes received."""
    if settings.traced:
        trace.begin(name)
    role = load()
    enter_phase("joining")
    join(settings, name, rank)
    enter_phase("running")
    result = pickle.dumps(role.function(*role.args))
    enter_phase("serving")
    received = wire.count() if settings.counted else None
    rpc.shutdown()
    return result, trace.collect(), received


def _leave_with_parent(control: Connection, answer: Callable[..., None]) -> None:
    """End with the parent; answer it whether calls run here, and are waited for."""
    os.setpgid(0, 0)
    # Linux kills us with what has started us, even if we are stopped. The fork server
    # ends with the parent, as long as nobody else holds its "alive" pipe.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    forget_server()

    def watch() -> None:
        with suppress(OSError):
            while os.read(control.fileno(), 1) == ASK:
                answer(bool(network.serves), bool(network.waits))
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def forget_server() -> None:
    """In a forked child: the parent's fork server is not this process's."""
    server = vars(forkserver)["_forkserver"]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server.__init__()


os.register_at_fork(after_in_child=forget_server)


def interface(host: str, named: str | None = None) -> str:
    """The network device that leads to a host, or the one named; else a ValueError."""
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
