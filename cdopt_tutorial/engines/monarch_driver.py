"""The driver of a run on Monarch: it starts the actors, and watches over them."""

import pickle
import queue
import threading
import time
from typing import Any

import monarch.actor as monarch

from cdopt_tutorial.engines import process
from cdopt_tutorial.engines.errors import WorkerError
from cdopt_tutorial.engines.monarch_worker import MonarchWorker, answer_of, named
from cdopt_tutorial.engines.on_actors import Plan
from cdopt_tutorial.engines.others import LOST
from cdopt_tutorial.engines.pace import Pace, find_late

TICK = 0.1  # seconds between two looks at the actors


def drive(plan: Plan) -> dict[str, Any]:
    """What the roles returned, by name; a WorkerError if one failed."""
    # By default Monarch ends this process when one dies, without saying which.
    monarch.unhandled_fault_hook = lambda failure: None
    return _Actors(plan).run()


class _Actors:
    """The actors of one run, each watched by two threads of this process."""

    def __init__(self, plan: Plan):
        plans = plan.workers()
        self._deadline = plan.join_deadline
        mesh = monarch.this_host().spawn_procs(per_host={"workers": len(plans)})
        actors = mesh.spawn("worker", MonarchWorker, plans)
        self._handles = {
            each.name: actors.slice(workers=rank) for rank, each in enumerate(plans)
        }
        self._heard: queue.Queue = queue.Queue()  # of what the threads find
        self._paces: dict[str, Pace] = {}

    def run(self) -> dict[str, Any]:
        """What the roles returned, by name; a WorkerError if one failed."""
        self._await_start()
        for name in self._handles:
            for watch in (self._play, self._listen):
                threading.Thread(target=watch, args=(name,), daemon=True).start()
        done: dict[str, Any] = {}
        while len(done) < len(self._handles):
            self._hear(done)
            late = {n: pace for n, pace in self._paces.items() if n not in done}
            if found := find_late(late):
                raise WorkerError(found[0], f"missed {found[1]}")
        for name in self._handles:  # the last that they have told
            self._take(name)
        while not self._heard.empty():
            self._hear(done)
        return done

    def _await_start(self) -> None:
        limit = time.monotonic() + self._deadline
        for name, handle in self._handles.items():
            try:
                with named(name):
                    left = max(0.1, limit - time.monotonic())
                    answer_of(handle.host.call_one(), left)
            except TimeoutError:
                reason = f"missed the deadline of {self._deadline:g} s to join"
                raise WorkerError(name, reason) from None

    def _hear(self, done: dict[str, Any]) -> None:
        """One thing that a thread has found, if there is any; raised if an error."""
        try:
            name, kind, *content = self._heard.get(timeout=TICK)
        except queue.Empty:
            return
        if kind == "failed":
            raise content[0]
        if kind == "done":
            done[name] = pickle.loads(content[0])
        elif kind == "pace":
            (self._paces[name],) = content
        else:
            process.report((name, kind, *content))

    def _play(self, name: str) -> None:
        try:
            with named(name):
                result = answer_of(self._handles[name].play.call_one(self._handles))
            self._heard.put((name, "done", result))
        except Exception as error:
            self._heard.put((name, "failed", error))

    def _listen(self, name: str) -> None:
        try:
            while True:
                self._take(name)
                time.sleep(TICK)
        except Exception as error:
            self._heard.put((name, "failed", error))

    def _take(self, name: str) -> None:
        """Hand on what a worker has told since the last time."""
        try:
            with named(name):
                told, pace = answer_of(self._handles[name].take.call_one(), LOST)
        except TimeoutError:
            silence = f"was not heard of for {LOST:g} s"
            raise WorkerError(name, silence) from None
        for kind, *content in told:
            self._heard.put((name, kind, *content))
        if pace is not None:
            pace = pace._replace(until=time.monotonic() + pace.until)
            self._heard.put((name, "pace", pace))
