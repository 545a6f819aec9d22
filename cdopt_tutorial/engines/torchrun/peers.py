"""The processes of one run under torchrun, each with one worker.

Each tells the others what becomes of its worker, and notices when one falls silent. A
thread of its own talks to the store, and nobody else does: a call to a host that has
been cut off returns late or never.
"""

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
from cdopt_tutorial.engines.watch.pace import LOST, TICK, Watched, find_late

UNKNOWN = "its host"  # of a worker whose process has not been heard from

_runs = count()  # of this process: all processes make the same ones in the same order
_hosts: dict[int, str] = {}  # of all runs, by rank


class Peers:
    """What this process and the others tell each other about their workers."""

    def __init__(
        self,
        names: Sequence[str],
        on_report: Callable[[str, Any], None] | None,
        join_deadline: float,
    ):
        self.own, self._on_report = torchrun.own_worker(names), on_report
        self.path = f"run{next(_runs)}"
        self._host = socket.gethostname()
        _hosts[names.index(self.own)] = self._host
        # Until its first sign of life: one host may be slow to begin.
        since = time.monotonic(), max(LOST, join_deadline)
        self._workers = {
            name: Watched(name, "running", None, _hosts.get(rank, UNKNOWN), *since)
            for rank, name in enumerate(names)
        }
        try:
            self._store = open_store(f"messages/{self.path}")  # by their receivers
        except RuntimeError as error:  # that of the first host has been killed
            raise WorkerError("torchrun", "can't be reached", str(error)) from None
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._failures: list[WorkerError] = []
        self._reports: deque[tuple[str, Any]] = deque()
        self._done: dict[str, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def __enter__(self) -> "Peers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10 * TICK)  # to send the rest, if anybody listens

    def look(self) -> None:
        """Raise the WorkerError of a worker elsewhere; pass on what was reported."""
        while self._reports:
            self.report(*self._reports.popleft())
        if self._failures:
            raise self._failures[0]
        if late := find_late(self._workers.values(), 0, 0, self.own):
            raise WorkerError(*late)

    def explains_in(self) -> float:
        """Seconds from when its peers miss a lost worker until it is noticed here."""
        return LOST + max(worker.patience for worker in self._workers.values())

    def fail(self, error: WorkerError) -> None:
        """Tell the others of a failure, unless they told this process."""
        if error not in self._failures:
            reason = f"{error.reason} (on {self._host})"
            self._tell("failure", type(error)(error.worker, reason), *self._workers)

    def report(self, worker: str, record: Any) -> None:
        """Pass a worker's report on to the first process."""
        if not torchrun.is_first():
            self._tell("report", record, next(iter(self._workers)))
        elif self._on_report is not None:
            self._on_report(worker, record)

    def exchange(self, done: dict[str, Any]) -> dict[str, Any]:
        """Exchange this process's result for those of all, once all are done."""
        self._tell("done", done[self.own], *self._workers)
        while len(self._done) < len(self._workers):
            self.look()
            time.sleep(TICK)
        self.look()
        return {name: self._done[name] for name in self._workers}

    def _tell(self, kind: str, content: Any, *workers: str) -> None:
        message = self._message(kind, content)
        self._outbox.extend((worker, message) for worker in workers)

    def _message(self, kind: str, content: Any) -> bytes:
        return pickle.dumps((self.own, self._host, kind, content))

    def _talk(self) -> None:
        beat = self._message("beat", None)
        while True:
            with suppress(RuntimeError):  # the store's: then nobody is heard from
                for name in self._workers:
                    self._store.queue_push(name, beat)
                while self._outbox:
                    self._store.queue_push(*self._outbox[0])
                    self._outbox.popleft()  # not before the store has it
                with suppress(QueueEmptyError):
                    while True:
                        self._receive()
                for name in self._done:  # which may leave before the others
                    self._workers[name].heard = time.monotonic()
            if self._over.wait(TICK) and not self._outbox:
                return

    def _receive(self) -> None:
        """Take one message from the store; a QueueEmptyError if there is none."""
        # Not `queue_len`: until the store answers, no other thread would run.
        message = self._store.queue_pop(self.own, False)
        name, host, kind, content = pickle.loads(message)
        match kind:
            case "failure":
                self._failures.append(content)
            case "report":
                self._reports.append((name, content))
            case "done":
                self._done[name] = content
        worker = self._workers[name]
        worker.heard, worker.patience, worker.host = time.monotonic(), LOST, host
        _hosts[list(self._workers).index(name)] = host
