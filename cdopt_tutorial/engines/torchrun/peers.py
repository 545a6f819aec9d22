"""The processes of one run under torchrun, each with one worker: they tell each other.

In goes what this process sees of its worker; out comes what the others saw of theirs.
A process that fails is told by its own, and one that falls silent is found here. A
thread of its own talks to the store, and nobody else does: a call to a host that has
been cut off comes back late or never.
"""

import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from torch.distributed import QueueEmptyError

from cdopt_tutorial import torchrun
from cdopt_tutorial.engines.torchrun.store import open_store
from cdopt_tutorial.engines.watch.errors import WorkerError
from cdopt_tutorial.engines.watch.late import LOST, TICK, Watched, find_late

UNKNOWN = "its host"  # of a worker whose process has not said where it is

_runs = count()  # of this process: all processes make the same ones in the same order


class Peers:
    """What this process and the others tell each other of their workers."""

    def __init__(
        self,
        names: Sequence[str],
        on_report: Callable[[str, Any], None] | None,
        join_deadline: float,
    ):
        self.own, self._on_report = torchrun.own_worker(names), on_report
        self.path = f"run{next(_runs)}"
        # Until its first sign of life: one host may be slow to begin.
        begun = "running", None, UNKNOWN, time.monotonic(), max(LOST, join_deadline)
        self._workers = {name: Watched(name, *begun) for name in names}
        self._workers[self.own].host = socket.gethostname()
        try:
            self._hosts = open_store("hosts")  # by rank, of all runs
            self._store = open_store(f"told/{self.path}")  # by worker, what it is told
        except RuntimeError as error:  # that of the first host has been killed
            raise WorkerError("torchrun", "can't be reached", str(error)) from None
        self._to_tell: deque[tuple[str, bytes]] = deque()
        self._failures: list[WorkerError] = []
        self._reports: deque[tuple[str, Any]] = deque()
        self._done: dict[str, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def __enter__(self) -> "Peers":
        # Before anything is begun, and for later runs as well: who is cut off before he
        # has come to one is named by his host, too.
        with suppress(RuntimeError):  # the first process has gone; silence will tell
            self._hosts.set(os.environ["RANK"], socket.gethostname())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10 * TICK)  # to tell the rest, if anybody listens

    def look(self) -> None:
        """Raise the WorkerError of who failed elsewhere; hand on what was reported."""
        while self._reports:
            self.report(*self._reports.popleft())
        if self._failures:
            raise self._failures[0]
        if late := find_late(self._workers.values(), 0, 0, self.own):
            raise WorkerError(*late)

    def explains_in(self) -> float:
        """Seconds within which it shows here who is lost, so that peers miss him."""
        return LOST + max(worker.patience for worker in self._workers.values())

    def fail(self, error: WorkerError) -> None:
        """Tell the others of a failure that this process was the first to see."""
        if error not in self._failures:
            reason = f"{error.reason} (on {socket.gethostname()})"
            self._tell("failure", type(error)(error.worker, reason), *self._workers)

    def report(self, worker: str, record: Any) -> None:
        """Hand on what a worker reports, to the first process."""
        if not torchrun.is_first():
            self._tell("report", record, next(iter(self._workers)))
        elif self._on_report is not None:
            self._on_report(worker, record)

    def exchange(self, done: dict[str, Any]) -> dict[str, Any]:
        """Of this process's worker, for that of all; once all are done."""
        self._tell("done", done[self.own], *self._workers)
        while len(self._done) < len(self._workers):
            self.look()
            time.sleep(TICK)
        self.look()
        return {name: self._done[name] for name in self._workers}

    def _tell(self, kind: str, content: Any, *workers: str) -> None:
        message = pickle.dumps((self.own, kind, content))
        self._to_tell.extend((worker, message) for worker in workers)

    def _talk(self) -> None:
        beat = pickle.dumps((self.own, "beat", None))
        while True:
            with suppress(RuntimeError):  # of the store: then nobody is heard of
                for name in self._workers:
                    self._store.queue_push(name, beat)
                while self._to_tell:
                    self._store.queue_push(*self._to_tell[0])
                    self._to_tell.popleft()  # not before the store has it
                with suppress(QueueEmptyError):
                    while True:
                        self._hear()
                for name in self._done:  # who may leave before the others
                    self._workers[name].heard = time.monotonic()
                for rank, worker in enumerate(self._workers.values()):
                    if worker.host == UNKNOWN and self._hosts.check([str(rank)]):
                        worker.host = self._hosts.get(str(rank)).decode()
            if self._over.wait(TICK) and not self._to_tell:
                return

    def _hear(self) -> None:
        """Take what somebody tells; a QueueEmptyError if nobody has told anything."""
        # Not `queue_len`: until the store answers, no other thread would run.
        name, kind, content = pickle.loads(self._store.queue_pop(self.own, False))
        match kind:
            case "failure":
                self._failures.append(content)
            case "report":
                self._reports.append((name, content))
            case "done":
                self._done[name] = content
        worker = self._workers[name]
        worker.heard, worker.patience = time.monotonic(), LOST
