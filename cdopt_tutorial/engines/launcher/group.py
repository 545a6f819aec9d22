"""The processes of one run: start them, watch over them, end them.

``_take_messages`` notices a worker that was killed, ``_look_for_stopped`` one that was
stopped, ``_look_for_late`` one that is late: the parent keeps the deadlines, since
torch's own rendezvous has no useful timeout.
"""

import base64
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from cdopt_tutorial.engines.launcher import forking, process
from cdopt_tutorial.engines.watch.errors import WorkerError, WorkerLost
from cdopt_tutorial.engines.watch.pace import TICK, Watched, find_late, read_pace

STOPPED = 1.5  # seconds after which a worker that is stopped counts as failed
GRACE = 0.4  # seconds to wait, after a failure, for one that explains it better
GRACE_LOST_PEER = 3.0  # the same after one that only says that a peer is gone
EXIT = 5.0  # seconds that a finished worker may take to leave

# How well a failure explains the others; the lowest number is reported.
_DIED, _RAISED, _LATE, _LOST_PEER = range(4)


@dataclass(eq=False, kw_only=True)
class _Worker(Watched):
    """The parent's view of one worker."""

    process: BaseProcess
    connection: Connection
    done: tuple[Any, Any, Any] = (None, None, None)
    unread: bytearray = field(default_factory=bytearray)

    def take(self) -> list[tuple]:
        """The complete messages since the last call; EOFError if the worker is gone."""
        # ``Connection.recv`` would wait for the rest from a worker that was stopped.
        ready = self.connection.poll()  # else its process has ended
        part = os.read(self.connection.fileno(), 2**20) if ready else b""
        if not part:
            raise EOFError
        self.unread += part
        if b"\n" not in part:
            return []
        *lines, self.unread = self.unread.split(b"\n")
        return [pickle.loads(base64.b64decode(line)) for line in lines]


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Handle an interrupt only at the end, so that nothing is left half done."""
    handler, came = signal.getsignal(signal.SIGINT), []
    here = threading.current_thread() is threading.main_thread()
    if not here or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


class Group:
    """The workers of one run, which leaves no process behind.

    Of a run on several hosts it has those of this host: the others' roles are None, and
    ``look_elsewhere`` raises a WorkerError, within ``explains_in()`` seconds, if one of
    them failed.
    """

    def __init__(
        self,
        settings: process.Settings,
        packed: Mapping[str, bytes | None],
        on_report: Callable[[str, Any], None] | None,
        look_elsewhere: Callable[[], None] = lambda: None,
        explains_in: Callable[[], float] = lambda: GRACE_LOST_PEER,
    ):
        self._settings, self._packed, self._on_report = settings, packed, on_report
        self._look_elsewhere, self._explains_in = look_elsewhere, explains_in
        self._workers: list[_Worker] = []
        self._failures: list[tuple[int, WorkerError]] = []

    def run(self, deadline: float, join_deadline: float) -> dict[str, tuple]:
        """By name: what the role returned, its recorded calls, and bytes received."""
        self._begin = time.monotonic()
        starting = None
        try:
            with _interrupts_later():
                starting = forking.start(self._start)
            self._await_start(starting, min(deadline, join_deadline))
            while not all(worker.settled for worker in self._workers):
                self._take_messages(TICK)
                self._look_for_stopped()
                self._look_for_late(deadline, join_deadline)
                self._look_elsewhere()
                if self._failures:
                    raise self._cause()
            return {worker.name: worker.done for worker in self._workers}
        finally:
            with _interrupts_later():
                if starting is not None:
                    self._end(starting)

    def _await_start(self, starting: futures.Future, deadline: float) -> None:
        """Wait until all have been started, which a stopped fork server never does."""
        try:
            starting.result(deadline)
        except TimeoutError:
            reason = f"missed the deadline of {deadline:g} s to start"
            raise WorkerError(self._workers[-1].name, reason) from None
        forking.check_network(self._workers[0].process.pid)

    def _start(self) -> None:
        for rank, (name, role) in enumerate(self._packed.items()):
            if role is None:
                continue
            # A pipe would hold us up if the worker is stopped before it reads.
            self._settings.path(name, "role").write_bytes(role)
            ours, theirs = Pipe(duplex=False)
            args = (self._settings, name, rank, theirs)
            child = forking.Process(target=process.main, args=args, name=name)
            now = time.monotonic()
            worker = _Worker(name=name, heard=now, process=child, connection=ours)
            self._workers.append(worker)
            with theirs:  # closed here, or our end would not see the worker's end
                try:
                    child.start()
                except (EOFError, BrokenPipeError) as error:
                    raise WorkerError(name, "was killed as it started") from error

    def _take_messages(self, timeout: float) -> None:
        """Handle what workers have sent, and note which are gone."""
        waited = {}
        for worker in self._workers:
            if not worker.settled:
                waited[worker.connection] = waited[worker.process.sentinel] = worker
        for worker in dict.fromkeys(map(waited.get, wait(list(waited), timeout))):
            try:
                messages = worker.take()
            except (EOFError, OSError):
                self._note_death(worker)
                continue
            for message in messages:
                if not worker.settled:
                    self._handle(worker, *message)

    def _handle(self, worker: _Worker, kind: str, *content: Any) -> None:
        match kind, content:
            case "phase", (phase,):
                worker.phase = phase
            case "report", (record,):
                record = process.unpickled(worker.name, "reported", record)
                if self._on_report is not None:
                    self._on_report(worker.name, record)
            case "output", (stream, line):
                show_line(worker.name, stream, line)
            case "result", (result, calls, received):
                result = process.unpickled(worker.name, "returned", result)
                worker.done = result, calls, received
                worker.phase = "done"
            case "failed", (error, lost_peer):
                worker.phase = "failed"
                self._failures.append((_LOST_PEER if lost_peer else _RAISED, error))

    def _note_death(self, worker: _Worker) -> None:
        worker.process.join(EXIT)
        worker.phase = "failed"
        code = worker.process.exitcode
        reason = f"exited with code {code} before it finished"
        if code is not None and code < 0:
            reason = f"was killed by {signal.Signals(-code).name}"
        elif code == forking.UNKNOWN and forking.server_ends():
            reason = "was ended, since the process that starts workers was killed"
        self._fail(_DIED, worker.name, reason, self._log(worker))

    def _look_for_stopped(self) -> None:
        for worker in self._workers:
            if worker.settled or not _is_stopped(worker.process.pid):
                worker.heard = time.monotonic()
            elif time.monotonic() > worker.heard + STOPPED:
                reason = "was stopped (SIGSTOP) and did not go on"
                self._fail(_DIED, worker.name, reason)

    def _look_for_late(self, deadline: float, join_deadline: float) -> None:
        """Fail the run for a worker that is late, and show its threads' stacks."""
        for worker in self._workers:
            worker.pace = read_pace(self._settings.path(worker.name, "pace"))
        late = find_late(self._workers, self._begin, join_deadline)
        if not (late := late or self._find_last(deadline)):
            return
        worker = next(w for w in self._workers if w.name == late[0])
        if worker.phase != "starting":  # then it could not show any yet
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR1)
                time.sleep(TICK)
        self._fail(_LATE, *late, self._log(worker))

    def _find_last(self, deadline: float) -> tuple[str, str] | None:
        """Which worker still runs at the deadline of the run."""
        if time.monotonic() <= self._begin + deadline:
            return None
        running = [w for w in self._workers if w.phase == "running"]
        last = running or [w for w in self._workers if not w.settled]
        also = f" (and {', '.join(w.name for w in last[1:])})" if last[1:] else ""
        return last[0].name, f"missed the run's deadline of {deadline:g} s{also}"

    def _log(self, worker: _Worker) -> str:
        """The end of what the worker's C++ libraries wrote."""
        with suppress(OSError):
            log = self._settings.path(worker.name, "log").read_text(errors="replace")
            return "\n".join(log.splitlines()[-80:])
        return ""

    def _fail(self, rank: int, worker: str, reason: str, details: str = "") -> None:
        kind = WorkerLost if rank == _DIED else WorkerError
        self._failures.append((rank, kind(worker, reason, details)))

    def _cause(self) -> WorkerError:
        """The failure that best explains the others, for which it waits a moment."""
        begin = time.monotonic()
        while True:
            rank, cause = min(self._failures, key=lambda failure: failure[0])
            grace = self._explains_in() if rank == _LOST_PEER else GRACE
            if rank == _DIED or time.monotonic() - begin > grace:
                return cause
            self._take_messages(TICK)
            self._look_for_stopped()
            self._look_elsewhere()

    def _end(self, starting: futures.Future) -> None:
        """End every process and reap it; workers that are done leave by themselves."""
        futures.wait([starting], EXIT)
        if not starting.done():
            forking.end_server()
            futures.wait([starting])
        started = [worker for worker in self._workers if worker.process.pid is not None]
        _join([worker.process for worker in started if worker.phase == "done"])
        for worker in started:
            _kill(worker.process.pid)
        if not _join([worker.process for worker in started]):
            forking.end_server()  # stopped, since it has not reported their ends
        for worker in started:
            worker.process.join()
            worker.process.close()
        for worker in self._workers:
            worker.connection.close()


def show_line(worker: str, stream: str, line: str) -> None:
    """Print a worker's line under its name."""
    print(f"[{worker}] {line}", file=getattr(sys, stream))


def _join(processes: list[BaseProcess]) -> bool:
    """Whether all processes end within EXIT seconds."""
    limit = time.monotonic() + EXIT
    for each in processes:
        each.join(max(0.0, limit - time.monotonic()))
    return all(each.exitcode is not None for each in processes)


def _is_stopped(pid: int | None) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _kill(pid: int) -> None:
    """Kill a worker and what it started: each worker leads a process group."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
