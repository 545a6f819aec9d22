"""The processes of one run under torchrun, each with one worker: they tell each other.

In goes what this process sees of its worker; out comes what the others saw of theirs.
A process that fails is told by its own, and one that falls silent is found here. A
thread of its own talks to the store, and nobody else does: a call to a host that has
been cut off comes back late or never.
"""

import os
import pickle
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

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
        self._workers = [Watched(name, *begun) for name in names]
        self._workers[int(os.environ["RANK"])].host = socket.gethostname()
        try:
            self._hosts = open_store("hosts")  # by rank, of all runs
            self._store = open_store(f"told/{self.path}")
        except RuntimeError as error:  # that of the first host has been killed
            raise WorkerError("torchrun", "can't be reached", str(error)) from None
        self._to_tell: deque[tuple[str, bytes]] = deque()
        self._told: Counter[str] = Counter()  # of each kind, by this process
        self._seen: Counter[tuple[str, str]] = Counter()  # of each kind and worker
        self._beats: dict[str, bytes] = {}
        self._failures: list[WorkerError] = []
        self._reports: queue.SimpleQueue = queue.SimpleQueue()
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
        while not self._reports.empty():
            self.report(*self._reports.get())
        if self._failures:
            raise self._failures[0]
        if late := find_late(self._workers, 0, 0, self.own):
            raise WorkerError(*late)

    def explains_in(self) -> float:
        """Seconds within which it shows here who is lost, so that peers miss him."""
        return LOST + max(worker.patience for worker in self._workers)

    def fail(self, error: WorkerError) -> None:
        """Tell the others of a failure that this process was the first to see."""
        if error not in self._failures:
            reason = f"{error.reason} (on {socket.gethostname()})"
            self._tell("failure", type(error)(error.worker, reason))

    def report(self, worker: str, record: Any) -> None:
        """Hand on what a worker reports, to the first process."""
        if not torchrun.is_first():
            self._tell("report", (worker, record))
        elif self._on_report is not None:
            self._on_report(worker, record)

    def exchange(self, done: dict[str, Any]) -> dict[str, Any]:
        """Of this process's worker, for that of all; once all are done."""
        self._tell("done", done[self.own])
        while len(self._done) < len(self._workers):
            self.look()
            time.sleep(TICK)
        self.look()
        return {worker.name: self._done[worker.name] for worker in self._workers}

    def _tell(self, kind: str, content: Any) -> None:
        key = f"{kind}/{self.own}/{self._told[kind]}"
        self._told[kind] += 1
        self._to_tell.append((key, pickle.dumps(content)))

    def _talk(self) -> None:
        for number in count():
            with suppress(RuntimeError):  # of the store: then nobody is heard of
                self._say(number)
                for rank, worker in enumerate(self._workers):
                    self._hear(worker)
                    if worker.host == UNKNOWN and self._hosts.check([str(rank)]):
                        worker.host = self._hosts.get(str(rank)).decode()
            if self._over.wait(TICK) and not self._to_tell:
                return

    def _say(self, number: int) -> None:
        self._store.set(f"beat/{self.own}", str(number))
        while self._to_tell:
            self._store.set(*self._to_tell[0])
            self._to_tell.popleft()  # not before the store has it

    def _hear(self, worker: Watched) -> None:
        name = worker.name
        done = self._new("done", name)  # before reports, which are told before it
        self._failures += self._new("failure", name)
        for report in self._new("report", name) if torchrun.is_first() else ():
            self._reports.put(report)
        for result in done:
            self._done[name] = result
        if self._store.check([f"beat/{name}"]):
            beat = self._store.get(f"beat/{name}")
            if beat != self._beats.get(name) or name in self._done:
                self._beats[name], worker.heard = beat, time.monotonic()
                worker.patience = LOST

    def _new(self, kind: str, name: str) -> list[Any]:
        """What a worker's process has told since the last time."""
        found = []
        while self._store.check([key := f"{kind}/{name}/{self._seen[kind, name]}"]):
            found.append(pickle.loads(self._store.get(key)))
            self._seen[kind, name] += 1
        return found
