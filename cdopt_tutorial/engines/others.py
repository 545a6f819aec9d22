"""The processes of one run under torchrun, each with one worker, of which all tell.

A thread of its own talks to the store, and nobody else does: a call to a host that has
been cut off comes back late or never.
"""

import pickle
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from torch.distributed import PrefixStore

from cdopt_tutorial import torchrun
from cdopt_tutorial.engines.errors import WorkerError
from cdopt_tutorial.engines.store import open_store

BEAT = 0.2  # seconds between two signs of life
LOST = 15.0  # seconds without one, after which a host counts as lost

_runs = count()  # of this process: all processes make the same ones in the same order


class Others:
    """What this process and the others tell each other of their workers."""

    def __init__(
        self,
        names: Sequence[str],
        on_report: Callable[[str, Any], None] | None,
        join_deadline: float,
    ):
        self.own, self._names = torchrun.own_worker(names), list(names)
        self._on_report, self._join_deadline = on_report, join_deadline
        self.path = f"run{next(_runs)}"
        self._all_runs = open_store("runs")
        self._store = PrefixStore(self.path, self._all_runs)
        self._told: Counter[str] = Counter()  # how many of each kind, by this process
        self._seen: Counter[tuple[str, str]] = Counter()  # of each kind and worker
        self._failures: list[WorkerError] = []
        self._to_tell: deque[tuple[str, bytes]] = deque()
        self._reports: queue.SimpleQueue = queue.SimpleQueue()
        self._done: dict[str, Any] = {}
        self._hosts: dict[str, str] = {}
        self._beats: dict[str, bytes] = {}
        self._heard = dict.fromkeys(names, time.monotonic())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def __enter__(self) -> "Others":
        self._hosts[self.own] = socket.gethostname()
        # Before anything is begun, and for later runs as well: who is cut off before he
        # has come to one is named by his host, too.
        with suppress(RuntimeError):  # the first process has gone; silence will tell
            self._all_runs.set(self._host_key(self.own), self._hosts[self.own])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10 * BEAT)  # to tell the rest, if anybody listens

    def look(self) -> None:
        """Raise the WorkerError of who failed elsewhere; hand on what was reported."""
        while not self._reports.empty():
            self.report(*self._reports.get())
        if self._failures:
            raise self._failures[0]
        over = {n: self._silence(n) - self._patience(n) for n in self._names}
        longest = max(over, key=over.__getitem__)
        if over[longest] > 0:
            name = find_lost(over, self._hosts, self.own)
            host, patience = self._hosts.get(name, "its host"), self._patience(longest)
            raise WorkerError(name, f"on {host} was not heard of for {patience:g} s")

    def _silence(self, name: str) -> float:
        return time.monotonic() - self._heard[name]

    def _patience(self, name: str) -> float:
        """Seconds of silence that are borne: one host may be slow to begin."""
        return LOST if name in self._beats else max(LOST, self._join_deadline)

    def explains_in(self) -> float:
        """Seconds within which it shows here who is lost, so that peers miss him."""
        return LOST + max(map(self._patience, self._names))

    def fail(self, error: WorkerError) -> None:
        """Tell the others of a failure that this process was the first to see."""
        if error not in self._failures:
            reason = f"{error.reason} (on {socket.gethostname()})"
            self._add("failure", type(error)(error.worker, reason))

    def report(self, worker: str, record: Any) -> None:
        """Hand on what a worker reports, to the first process."""
        if not torchrun.is_first():
            self._add("report", (worker, record))
        elif self._on_report is not None:
            self._on_report(worker, record)

    def exchange(self, done: dict[str, Any]) -> dict[str, Any]:
        """Of this process's worker, for that of all; once all are done."""
        self._tell(f"done/{self.own}", done[self.own])
        while len(self._done) < len(self._names):
            self.look()
            time.sleep(BEAT)
        self.look()
        return {name: self._done[name] for name in self._names}

    def _tell(self, key: str, content: Any) -> None:
        self._to_tell.append((key, pickle.dumps(content)))

    def _add(self, kind: str, content: Any) -> None:
        """Tell of something of which there may be several."""
        self._tell(f"{kind}/{self.own}/{self._told[kind]}", content)
        self._told[kind] += 1

    def _talk(self) -> None:
        for number in count():
            with suppress(RuntimeError):  # of the store: then nobody is heard of
                self._say_and_listen(number)
            if self._over.wait(BEAT) and not self._to_tell:
                return

    def _say_and_listen(self, number: int) -> None:
        self._store.set(f"beat/{self.own}", str(number))
        while self._to_tell:
            self._store.set(*self._to_tell[0])
            self._to_tell.popleft()  # not before the store has it
        for failure in self._new("failure"):
            self._failures.append(failure)
        if torchrun.is_first():
            for report in self._new("report"):
                self._reports.put(report)
        for name in self._names:
            self._listen_to(name)

    def _listen_to(self, name: str) -> None:
        if name not in self._hosts and self._all_runs.check([self._host_key(name)]):
            self._hosts[name] = self._all_runs.get(self._host_key(name)).decode()
        if name not in self._done and self._has(f"done/{name}"):
            self._done[name] = self._get(f"done/{name}")
        if self._has(f"beat/{name}"):
            beat = self._store.get(f"beat/{name}")
            if beat != self._beats.get(name) or name in self._done:
                self._beats[name], self._heard[name] = beat, time.monotonic()

    def _host_key(self, name: str) -> str:
        """Of the process, whose worker may have another name in another run."""
        return f"host/{self._names.index(name)}"

    def _new(self, kind: str) -> Iterator[Any]:
        """What was added since the last time."""
        for name in self._names:
            while self._has(key := f"{kind}/{name}/{self._seen[kind, name]}"):
                found = self._get(key)
                self._seen[kind, name] += 1
                yield found

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _get(self, key: str) -> Any:
        return pickle.loads(self._store.get(key))


def find_lost(over: Mapping[str, float], hosts: Mapping[str, str], own: str) -> str:
    """Who is lost, once somebody's silence is longer than is borne.

    ``over`` is by how many seconds, below 0 while it is borne; ``hosts`` are those that
    are known. Those of one host fall silent within a beat: the first of them is named.
    Who is cut off himself hears of nobody, not even of himself; the last that he heard
    may well have been of others. So he names nobody on his own host.
    """
    silent = [name for name in over if over[name] > -10 * BEAT]
    suspects = over if own in silent else silent
    here = hosts.get(own)
    return next((n for n in suspects if hosts.get(n) != here), silent[0])
