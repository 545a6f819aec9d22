"""What runs inside a worker: join the others, play the role, report to the parent.

The role comes in a file. Through a pipe go the worker's phase, what it prints and
reports, and at last its result, or the error with which it failed.
"""

import base64
import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.multiprocessing import _prctl_pr_set_pdeathsig, _set_thread_name

from cdopt_tutorial.engines.launcher import pack
from cdopt_tutorial.engines.probes import trace, wire
from cdopt_tutorial.engines.seam import network
from cdopt_tutorial.engines.torchrun.store import register_schemes
from cdopt_tutorial.engines.watch import pace
from cdopt_tutorial.engines.watch.errors import WorkerError, origin

FOREVER = 2e6  # seconds that torch can still count; to a store 0 means no time at all
LOOPBACK = "lo"

# Texts by which torch says that the other end of a call is gone.
_LOST_PEER = ("eof", "ECONNRESET", "EPIPE", "connection", "Connection", "shut down")


@dataclass(frozen=True)
class Settings:
    """What all workers of a run need in order to join it; see ``launch``."""

    world_size: int
    folder: str  # the run's own, which only this user can read
    init_method: str  # the address at which its groups form
    interface: str  # the network device that workers listen on
    rpc_timeout: float
    rpc_threads: int
    polling: bool
    modules: tuple[str, ...]  # that any role needs; every worker imports them first
    traced: bool
    counted: bool

    def path(self, worker: str, kind: str) -> Path:
        """A worker's file: its "role", its "pace", or the "log" of its libraries."""
        return Path(self.folder, f"{worker}.{kind}")


class Channel:
    """The worker's end of the pipe to its parent, for several threads.

    Each message is a line, so that the reader sees where it ends.
    """

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, threading.Lock()
        self._file = open(connection.fileno(), "wb", closefd=False)

    def send(self, kind: str, *content: Any) -> None:
        # With multiprocessing's own pickler, torch would pass tensors as file
        # descriptors, which die with the sender.
        line = base64.b64encode(pickle.dumps((kind, *content))) + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()


class Forwarded(io.TextIOBase):
    """A text stream whose lines the parent prints under the worker's name."""

    def __init__(self, channel: Any, stream: str):
        self._channel, self._stream, self.line = channel, stream, ""

    def write(self, text: str) -> int:
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            self._channel.send("output", self._stream, line)
        return len(text)


_channel: Any = None  # has a Channel's ``send``
_settings: Settings | None = None


def serve() -> None:
    """A role that only answers calls, until all roles are done."""


def report(record: Any) -> None:
    """Send ``on_report`` a record, which must pickle; outside workers do nothing."""
    if _channel is not None:
        _channel.send("report", pickle.dumps(record))


def load(settings: Settings, packed: bytes) -> Any:
    """A worker's role, once its modules are imported and ``attach`` has been called."""
    # Imports come before the first call: two threads that import at once, to answer
    # calls, can get in each other's way.
    for module in settings.modules:
        importlib.import_module(module)
    attach, role = pack.unpack(packed)
    torch.set_num_threads(role.num_threads)
    if attach is not None:
        attach()
    return role


def play(role: Any) -> bytes:
    """Run a role in its worker; return its result, pickled."""
    torch.set_num_threads(role.num_threads)  # an actor calls `load` in another thread
    try:
        return pickle.dumps(role.function(*role.args, **role.kwargs))
    finally:
        finish_output()


def forward_output() -> None:
    """Send what this worker prints to its parent from now on."""
    sys.stdout = Forwarded(_channel, "stdout")
    sys.stderr = Forwarded(_channel, "stderr")


def finish_output() -> None:
    """Send the last line even if it does not end."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Forwarded) and stream.line:
            stream.write("\n")


def unpickled(worker: str, what: str, content: bytes) -> Any:
    """What a worker sent; a WorkerError that names it if that can't be unpickled."""
    try:
        return pickle.loads(content)
    except Exception as error:
        details = "".join(traceback.format_exception(error))
        raise WorkerError(worker, f"{what} what can't be unpickled", details) from None


def fail(error: WorkerError) -> None:
    """Fail the run from a thread, while this worker's main thread waits."""
    if _channel is not None:
        _channel.send("failed", error, False)


def meeting(name: str) -> str:
    """The ``init_method`` of a process group, whose members all give it the same name.

    A process that was not launched takes the address from the environment.
    """
    return "env://" if _settings is None else f"{_settings.init_method}/{name}"


def enter(settings: Settings, channel: Any) -> None:
    """Make this process a worker of a run, which sends its messages by a channel."""
    global _channel, _settings
    _channel, _settings = channel, settings


def main(settings: Settings, name: str, rank: int, connection: Connection) -> None:
    """Entry point of a worker process; called by the launcher only."""
    _set_thread_name(name)  # as `top` and `ps` show it
    _leave_with_parent()
    channel = Channel(connection)
    enter(settings, channel)
    # Its path leads through an open file of the parent's.
    multiprocessing.current_process()._config.pop("tempdir", None)
    try:
        pace.begin(settings.path(name, "pace"))
        _log_output(settings.path(name, "log"))
        forward_output()
    except FileNotFoundError:  # the parent is ending, and its folder is gone
        os._exit(1)
    try:
        _play(settings, name, rank, channel)
    except BaseException as error:  # the parent decides what becomes of it
        channel.send("failed", describe(name, error), _has_lost_peer(error))


def _play(settings: Settings, name: str, rank: int, channel: Channel) -> None:
    """Run the role, among the others."""
    if settings.traced:
        network.enter(trace.Recording(name, network.current()))
    role = load(settings, settings.path(name, "role").read_bytes())
    channel.send("phase", "joining")
    join(settings, name, rank)
    channel.send("phase", "running")
    result = play(role)
    channel.send("phase", "serving")
    received = wire.count() if settings.counted else None
    rpc.shutdown()
    finish_output()  # of calls answered meanwhile
    channel.send("result", result, trace.collect(), received)


def _leave_with_parent() -> None:
    """End this process, and what it starts, when the parent ends."""
    os.setpgid(0, 0)
    # Linux kills us with the fork server, even if we are stopped. The server ends with
    # the parent, as long as nobody else holds its "alive" pipe.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)
    sentinel = multiprocessing.parent_process().sentinel

    def watch() -> None:
        wait([sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


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
    register_schemes()
    # A warning of torch's at each ``init_rpc``, about its own use of its own class.
    text = "You are using a Backend .* as a ProcessGroup"
    warnings.filterwarnings("ignore", message=text)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=meeting("rendezvous"),
        rpc_timeout=settings.rpc_timeout or FOREVER,
        num_worker_threads=settings.rpc_threads,
        # None means shared memory, the fastest. Sockets don't poll, and count bytes.
        _transports=None if settings.polling else ["uv"],
        _channels=None if settings.polling else ["basic"],
    )
    rpc.init_rpc(name, None, rank, settings.world_size, options)


def describe(name: str, error: BaseException) -> WorkerError:
    """A worker's exception as text: who raised it, what, and the traceback."""
    if isinstance(error, WorkerError):
        return error
    details = "".join(traceback.format_exception(error))
    # Formatting can't fail, whatever its own ``__str__`` does.
    found = origin("".join(traceback.format_exception_only(error)).strip())
    if found is not None and found[0] != name:
        worker, kind, remote = found
        stack = "".join(traceback.format_tb(error.__traceback__))
        details = f"{remote}\nCalled by {name}:\n{stack}"
        return WorkerError(worker, f"raised {kind} in a call that {name} made", details)
    if isinstance(error, SystemExit):
        reason = f"exited with code {error.code} before it finished"
        return WorkerError(name, reason, details)
    return WorkerError(name, f"raised {type(error).__name__}", details)


def _has_lost_peer(error: BaseException) -> bool:
    """Whether it only says that another worker is gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True  # the store is gone, in which groups form
    if not isinstance(error, RuntimeError) or isinstance(error, WorkerError):
        return False
    message = str(error)
    return origin(message) is None and any(text in message for text in _LOST_PEER)
