"""The processes of one run: start them, watch over them, end them.

``_note_death`` names a worker that was killed, ``_look_for_stopped`` one that was
stopped, and ``_look_at_the_time`` who misses a deadline: the parent keeps these, since
torch's own rendezvous has no useful timeout. ``_silent`` finds whom others wait for.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from cdopt_tutorial.calls.errors import WorkerError, WorkerLost, WorkerSilent
from cdopt_tutorial.run import forking, pack, worker

TICK = 0.2  # seconds between two looks at the workers
STOPPED = 1.5  # seconds after which a worker that is stopped counts as failed
GRACE = 0.4  # seconds to wait, after a failure, for one that explains it better
GRACE_LOST_PEER = 3.0  # the same after one that only says that a peer is gone
ANSWER = 2.0  # seconds in which a worker says whether it waits for others
EXIT = 5.0  # seconds that a finished worker may take to leave

# How well a failure explains the others; the lowest number is reported.
_DIED, _RAISED, _SILENT, _LATE, _LOST_PEER = range(5)


@dataclass(eq=False, kw_only=True)
class _Worker:
    """The parent's view of one worker."""

    name: str
    process: BaseProcess
    pid: int
    control: Connection
    phase: str = "starting"  # then joining, running, serving, done or failed
    heard: float = field(default_factory=time.monotonic)  # last seen going on
    # How much it waits for others: below 2 it keeps them waiting, or does not answer.
    waiting: int = 0
    done: tuple = ()
    unread: bytearray = field(default_factory=bytearray)  # of a message

    @property
    def settled(self) -> bool:
        return self.phase in ("done", "failed")

    def messages(self) -> list[tuple] | None:
        """Those that have come since the last call; None if no more can come."""
        part = b""
        with suppress(OSError):
            # ``Connection.recv`` would wait for the rest from one that was stopped.
            if self.control.poll():
                part = os.read(self.control.fileno(), 2**20)
        if not part:
            return None
        self.unread += part
        come = []
        while len(self.unread) >= (end := 8 + int.from_bytes(self.unread[:8], "big")):
            come.append(pickle.loads(self.unread[8:end]))
            del self.unread[:end]
        return come


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
    """The workers of one run, which leaves no process behind."""

    def __init__(
        self,
        settings: worker.Settings,
        packed: Mapping[str, bytes],
        on_report: Callable[[str, Any], None] | None,
        process: type[BaseProcess] = forking.Process,
    ):
        self._settings, self._packed, self._on_report = settings, packed, on_report
        self._process = process
        self._workers: list[_Worker] = []
        self._failures: list[tuple[int, WorkerError]] = []
        # What was printed and does not end a line, by worker and stream.
        self._printed: dict[tuple[str, str], bytes] = defaultdict(bytes)

    def run(self) -> dict[str, tuple]:
        """By name: the role's result, pickled, its recorded calls, bytes received."""
        self._begin = time.monotonic()
        try:
            with _interrupts_later(), forking.server():
                self._start()
            while not all(each.settled for each in self._workers):
                self._take_messages(TICK)
                self._look_for_stopped()
                self._look_at_the_time()
                if self._failures:
                    raise self._cause()
            return {each.name: each.done for each in self._workers}
        finally:
            with _interrupts_later():
                self._end()

    def _start(self) -> None:
        for rank, (name, role) in enumerate(self._packed.items()):
            # A pipe would hold us up if the worker is stopped before it reads.
            self._settings.file(name, "role").write_bytes(role)
            ours, theirs = Pipe()
            args = self._settings, name, rank, theirs
            process = self._process(target=worker.main, args=args, name=name)
            with theirs:  # or ours would not see that the worker's is closed
                try:
                    process.start()
                except (EOFError, ConnectionError):
                    what = "could not be started: what starts workers ended, see stderr"
                    raise WorkerError(name, what) from None
            assert process.pid is not None  # it has started
            pid = process.pid
            made = _Worker(name=name, process=process, pid=pid, control=ours)
            self._workers.append(made)

    def _take_messages(self, timeout: float) -> None:
        """Handle what workers have sent, and note which are gone."""
        senders: dict[Any, _Worker] = {}
        for each in self._workers:
            if not each.settled:
                senders |= {each.control: each, each.process.sentinel: each}
        ready = wait(list(senders), timeout)
        for each in dict.fromkeys(senders[end] for end in ready):
            messages = each.messages()
            if messages is None:  # its process has ended
                self._note_death(each)
            for message in messages or ():
                self._handle(each, *message)

    def _handle(self, each: _Worker, kind: str, name: str, *content: Any) -> None:
        """Handle a message of a worker, or of one of Ray's that it hands on."""
        match kind, content:
            case "stdout" | "stderr", (text,):
                self._print(name, kind, text)
            case _ if each.settled:
                pass
            case "phase", (phase,):
                each.phase = phase
            case "busy", (serves, awaits):
                works = each.phase == "running" or serves
                each.waiting = 3 if not works else 2 if awaits else 1
            case "report", (record,):
                record = pack.loads(name, "reported", record)
                if self._on_report is not None:
                    self._on_report(name, record)
            case "result", _:
                each.phase, each.done = "done", content
            case "failed", (error, lost_peer):
                each.phase = "failed"
                silent = isinstance(error, WorkerSilent)
                rank = _LOST_PEER if lost_peer else _SILENT if silent else _RAISED
                self._failures.append((rank, error))

    def _print(self, name: str, stream: str, text: bytes) -> None:
        """Print what makes whole lines, each under its worker's name."""
        *lines, rest = (self._printed[name, stream] + text).split(b"\n")
        self._printed[name, stream] = rest
        for line in lines:
            whole = line.decode(errors="replace")
            print(f"[{name}] {whole}", file=getattr(sys, stream))

    def _note_death(self, each: _Worker) -> None:
        each.process.join(EXIT)
        each.phase = "failed"
        code = each.process.exitcode
        reason = f"exited with code {code} before it finished"
        if code is not None and code < 0:  # a real-time signal has no name
            named = {number.value: number.name for number in signal.Signals}
            reason = f"was killed by {named.get(-code, f'signal {-code}')}"
        self._fail(_DIED, each.name, reason, self._log(each))

    def _look_for_stopped(self) -> None:
        """Fail the run for a worker that was stopped and does not go on."""
        for each in self._workers:
            with suppress(psutil.Error):  # it has just ended
                status = psutil.Process(each.pid).status()
                if each.settled or status != psutil.STATUS_STOPPED:
                    each.heard = time.monotonic()
                elif time.monotonic() > each.heard + STOPPED:
                    reason = "was stopped (SIGSTOP) and did not go on"
                    self._fail(_DIED, each.name, reason)

    def _look_at_the_time(self) -> None:
        """Fail the run at a deadline, for the worker that the others wait for."""
        passed, phases = time.monotonic() - self._begin, ("starting", "joining")
        late = [w for phase in phases for w in self._workers if w.phase == phase]
        if late and passed > (limit := self._settings.join_deadline):
            reason = f"missed the deadline of {limit:g} s to join"
        elif passed > (limit := self._settings.deadline) and (late := self._at_work()):
            reason = f"missed the run's deadline of {limit:g} s"
        else:
            return
        self._fail(_LATE, late[0].name, reason, self._stacks(late[0]))

    def _at_work(self) -> list[_Worker]:
        """The workers that are not done, first those that wait for no other one."""
        open_ = [each for each in self._workers if not each.settled]
        for each in open_:
            each.waiting = 0
            with suppress(OSError):
                os.write(each.control.fileno(), worker.ASK)
        limit = time.monotonic() + ANSWER
        while time.monotonic() < limit and not all(each.waiting for each in open_):
            self._take_messages(TICK)
        return sorted(open_, key=lambda each: each.waiting)

    def _stacks(self, each: _Worker) -> str:
        """What a worker's threads do now."""
        if each.phase != "starting":  # before it can't show any
            before, limit = self._log(each), time.monotonic() + ANSWER
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGUSR1)
            while self._log(each) == before and time.monotonic() < limit:
                time.sleep(TICK)
        return self._log(each)

    def _log(self, each: _Worker) -> str:
        """The end of what the worker's C++ libraries wrote."""
        with suppress(OSError):
            log = self._settings.file(each.name, "log").read_text(errors="replace")
            return "\n".join(log.splitlines()[-80:])
        return ""

    def _fail(self, rank: int, name: str, reason: str, details: str = "") -> None:
        kind = WorkerLost if rank == _DIED else WorkerError
        self._failures.append((rank, kind(name, reason, details)))

    def _cause(self) -> WorkerError:
        """The failure that best explains the others, for which it waits a moment."""
        begin = time.monotonic()
        while True:
            rank, cause = min(self._failures, key=lambda failure: failure[0])
            grace = GRACE_LOST_PEER if rank == _LOST_PEER else GRACE
            if rank in (_DIED, _LATE) or time.monotonic() - begin > grace:
                break
            self._take_messages(TICK)
            self._look_for_stopped()
        return self._silent(cause) if rank == _SILENT else cause

    def _silent(self, cause: WorkerError) -> WorkerError:
        """The error of the worker that has kept the others waiting, if one is at work.

        A time-out names whom a worker has called, which may itself have waited.
        """
        last = [each for each in self._at_work() if each.waiting < 2]
        if not last:
            return cause
        name, stacks = last[0].name, self._stacks(last[0])
        if name == cause.worker:
            return type(cause)(name, cause.reason, f"{cause.details}\n\n{stacks}")
        return WorkerError(name, f"kept others waiting: {cause.headline}", stacks)

    def _end(self) -> None:
        """End every process and reap it; workers that are done leave by themselves."""
        limit = time.monotonic() + EXIT
        for each in self._workers:
            if each.phase == "done":
                each.process.join(max(0.0, limit - time.monotonic()))
        for each in self._workers:  # and what they started: each leads a group
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(each.pid, signal.SIGKILL)
        for each in self._workers:
            each.process.join()
            each.process.close()
            each.phase = "failed"  # what it has still sent counts only if it is text
            with each.control:
                while (messages := each.messages()) is not None:
                    for message in messages:
                        self._handle(each, *message)
        for name, stream in [key for key, rest in self._printed.items() if rest]:
            self._print(name, stream, b"\n")
