"""What runs inside a worker: join the others, play the role, report to the parent."""

import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from cdopt_tutorial.engines import trace, wire
from cdopt_tutorial.engines.device import DeviceMaps
from cdopt_tutorial.engines.errors import origin

HEADER = 8  # bytes that tell how long the message behind them is
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

# Texts by which torch says that the other end of a call has gone.
_LOST_PEER = ("eof", "ECONNRESET", "EPIPE", "connection", "Connection", "shut down")


@dataclass(frozen=True)
class Settings:
    """What all workers of a run need to know to join it.

    Attributes:
        world_size: number of workers.
        folder: the run's own directory, with the rendezvous file and the logs.
        rpc_timeout: seconds until an unanswered call fails.
        rpc_threads: threads that answer calls.
        polling: whether idle workers poll shared memory for messages.
        device_maps: each worker's, by its name.
        modules: what any of the roles needs; every worker imports it first.
        attach: called before the role begins; None does nothing.
        traced: whether to record every call.
        counted: whether to count what the sockets receive.
    """

    world_size: int
    folder: str
    rpc_timeout: float
    rpc_threads: int
    polling: bool
    device_maps: Mapping[str, DeviceMaps]
    modules: tuple[str, ...]
    attach: Callable[[], None] | None
    traced: bool
    counted: bool


@dataclass(frozen=True)
class Failure:
    """An exception that left a role, as text, since not every exception pickles.

    Attributes:
        worker: where the exception was raised first.
        reason: one line.
        details: traceback, remote part included.
        lost_peer: whether it only says that another worker has gone.
    """

    worker: str
    reason: str
    details: str
    lost_peer: bool = False


class Channel:
    """The worker's end of the pipe to its parent; safe to use from several threads."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, *content: Any) -> None:
        # torch teaches multiprocessing's own pickler to pass tensors as file
        # descriptors, which die with the sender; plain pickle passes their values.
        message = pickle.dumps((kind, *content))
        rest = memoryview(len(message).to_bytes(HEADER, "big") + message)
        with self._lock:
            while rest:
                rest = rest[os.write(self._connection.fileno(), rest) :]


class _Forwarded(io.TextIOBase):
    """A text stream whose lines the parent prints under the worker's name."""

    def __init__(self, channel: Channel, stream: str):
        self._channel, self._stream, self._line = channel, stream, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._channel.send("output", self._stream, line)
        return len(text)


_channel: Channel | None = None
_settings: Settings | None = None
_pace_file = -1  # a file, since the launcher can read it whatever we are stuck in
_places = 0
_PACE = struct.Struct("<qdd128s")


def serve() -> None:
    """A role that does nothing by itself: it answers calls until all are done."""


def report(record: Any) -> None:
    """Send a record to the parent while the role still runs; called by roles.

    The parent hands it to ``launch``'s ``on_report``. In a process that was not
    launched, for instance one of torchrun's, there is nobody to tell, and nothing
    happens.

    Args:
        record: anything that pickles.
    """
    if _channel is not None:
        _channel.send("report", record)


def meeting(name: str) -> str:
    """Where workers can meet for a process group of their own; called by roles.

    Two groups that meet at once need two names. In a process that was not launched,
    for instance one of torchrun's, the environment says where.

    Args:
        name: of the group, the same for all who are in it.

    Returns:
        The ``init_method``: a file in the directory of this run, so no port is opened
        to the world, and nothing is left of it.
    """
    return "env://" if _settings is None else f"file://{_settings.folder}/{name}"


class Pace(NamedTuple):
    """How far a worker has come in work that it does in step with others.

    Attributes:
        places: that it has passed.
        until: when it must have passed the next one, on ``time.monotonic``'s clock.
        seconds: that it has for that.
        waits_for: name of the worker that it asks on the way; empty for none.
    """

    places: int
    until: float
    seconds: float
    waits_for: str


def passed(seconds: float, waits_for: str = "") -> None:
    """Note that this worker has passed one more place in its work; for roles.

    Workers that wait for each other all pass the same places, so the one that has
    passed the fewest waits for none of the others. If it passes no further one in
    time, the launcher fails the run and names it. That holds in the threads that
    answer calls, too, where the deadline of a role does not, and costs two
    microseconds. In a process that was not launched nothing happens.

    Args:
        seconds: until the next place; infinite behind the last one.
        waits_for: another kind of worker, which is asked for something on the way,
            and is named in this one's place.
    """
    global _places
    if _settings is not None:
        _places += 1
        pace = _places, time.monotonic() + seconds, seconds, waits_for.encode()
        os.pwrite(_pace_file, _PACE.pack(*pace), 0)


def read_pace(settings: Settings, name: str) -> Pace | None:
    """How far a worker has come; None if it passes no places. For the launcher."""
    with suppress(OSError), open(_pace_path(settings, name), "rb") as file:
        content = file.read()
        if content:
            *numbers, waits_for = _PACE.unpack(content)
            return Pace(*numbers, waits_for.rstrip(b"\0").decode())
    return None


def _pace_path(settings: Settings, name: str) -> str:
    return os.path.join(settings.folder, f"{name}.pace")


def log_path(settings: Settings, name: str) -> str:
    """Where a worker's C++ libraries write."""
    return os.path.join(settings.folder, f"{name}.log")


def role_path(settings: Settings, name: str) -> str:
    """Where the launcher leaves a worker's packed role."""
    return os.path.join(settings.folder, f"{name}.role")


def main(
    settings: Settings,
    name: str,
    rank: int,
    num_threads: int,
    connection: Connection,
) -> None:
    """Entry point of a worker process; called by the launcher only."""
    global _channel, _settings, _pace_file
    _leave_with_parent(settings.folder)
    _channel, _settings = Channel(connection), settings
    _pace_file = os.open(_pace_path(settings, name), os.O_WRONLY | os.O_CREAT, 0o600)
    channel = _channel
    _redirect_output(log_path(settings, name), channel)
    try:
        torch.set_num_threads(num_threads)
        # Before the first call comes: a worker that only serves would import what it
        # is asked for in the threads that answer, and two of them can get in each
        # other's way ("cannot import name ... from partially initialized module").
        for module in settings.modules:
            importlib.import_module(module)
        with open(role_path(settings, name), "rb") as role:
            function, args, kwargs = pickle.load(role)
        channel.send("phase", "joining")
        if settings.traced:
            trace.install(name)
        if settings.attach is not None:
            settings.attach()
        _join(settings, name, rank)
        channel.send("phase", "running")
        result = pickle.dumps(function(*args, **kwargs))
        channel.send("phase", "serving")
        received = wire.count() if settings.counted else None
        rpc.shutdown()
        channel.send("result", result, trace.collect(), received)
    except BaseException as error:  # the parent decides what becomes of it
        channel.send("failed", _describe(name, error))


def _leave_with_parent(folder: str) -> None:
    """Make sure that this process, and what it starts, ends when the parent does."""
    os.setpgid(0, 0)
    # Linux kills us with the fork server, which reaches a stopped process too. The
    # server ends once nobody holds its "alive" pipe: only the parent should. The
    # thread does the same where prctl does not exist.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)
    sentinel = multiprocessing.parent_process().sentinel

    def watch() -> None:
        wait([sentinel])
        shutil.rmtree(folder, ignore_errors=True)  # the parent no longer can
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _redirect_output(path: str, channel: Channel) -> None:
    """Python's output goes to the parent, the C++ libraries' into the worker's log."""
    log = open(path, "w")  # noqa: SIM115 (open as long as the process lives)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    sys.stdout = _Forwarded(channel, "stdout")
    sys.stderr = _Forwarded(channel, "stderr")


def ignore_own_warning() -> None:
    """Silence what torch says at each ``init_rpc`` of its own use of its own class."""
    warnings.filterwarnings(
        "ignore", message="You are using a Backend .* as a ProcessGroup"
    )


def _join(settings: Settings, name: str, rank: int) -> None:
    """Join the RPC group: rendezvous by file, listen on the loopback device only."""
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    ignore_own_warning()
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=settings.world_size,
        rpc_backend_options=rpc_options(settings, name),
    )


def rpc_options(settings: Settings, name: str) -> rpc.TensorPipeRpcBackendOptions:
    """How a worker's RPC agent is to talk to the others'."""
    mapped = any(settings.device_maps.values())
    return rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{settings.folder}/rendezvous",
        rpc_timeout=settings.rpc_timeout,
        num_worker_threads=settings.rpc_threads,
        device_maps=settings.device_maps[name],
        # None takes the fastest: shared memory for messages, and for tensors a
        # look into the other's. Sockets do not poll, and count what they carry.
        _transports=None if settings.polling else ["uv"],
        # The basic channel carries no tensor of a GPU.
        _channels=None if settings.polling or mapped else ["basic"],
    )


def _describe(name: str, error: BaseException) -> Failure:
    message = str(error)
    details = "".join(traceback.format_exception(error))
    remote = origin(message)
    if remote is not None and remote.worker != name:
        reason = f"raised {remote.kind} in a call that {name} made"
        stack = "".join(traceback.format_tb(error.__traceback__))
        return Failure(
            remote.worker, reason, f"{remote.traceback}\nCalled by {name}:\n{stack}"
        )
    if isinstance(error, SystemExit):
        return Failure(
            name, f"exited with code {error.code} before it finished", details
        )
    lost = isinstance(error, RuntimeError) and any(
        text in message for text in _LOST_PEER
    )
    return Failure(name, f"raised {type(error).__name__}", details, lost)
