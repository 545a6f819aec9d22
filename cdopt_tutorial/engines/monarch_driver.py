"""The driver of a run on Monarch: it starts the actors, and watches over them."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import monarch.actor as monarch

from cdopt_tutorial.engines import process
from cdopt_tutorial.engines.errors import WorkerError
from cdopt_tutorial.engines.monarch_worker import MonarchWorker, answer_of, named
from cdopt_tutorial.engines.on_actors import Plan
from cdopt_tutorial.engines.others import LOST
from cdopt_tutorial.engines.pace import Pace, find_late

TICK = 0.1  # seconds between two looks at the actors


def drive(plan: Plan) -> dict[str, bytes]:
    """What the roles returned, by name, pickled; a WorkerError if one failed."""
    # By default Monarch ends this process when one dies, without saying which.
    monarch.unhandled_fault_hook = lambda failure: None
    plans = plan.workers()
    mesh = monarch.this_host().spawn_procs(per_host={"workers": len(plans)})
    actors = mesh.spawn("worker", MonarchWorker, plans)
    handles = {each.name: actors.slice(workers=rank) for rank, each in enumerate(plans)}
    return Watch(handles, plan.join_deadline).run()


class Watch:
    """Over the actors of one run, by two threads of this process for each."""

    def __init__(self, handles: Mapping[str, Any], deadline: float):
        self._handles, self._deadline = handles, deadline
        self._heard: queue.Queue = queue.Queue()  # of what the threads find
        self._all_done = threading.Event()
        self._paces: dict[str, Pace] = {}

    def run(self) -> dict[str, bytes]:
        """What the roles returned, by name, pickled; a WorkerError if one failed."""
        self._await_start()
        for name in self._handles:
            _start(self._play, name)
        listeners = [_start(self._listen, name) for name in self._handles]
        done: dict[str, bytes] = {}
        while len(done) < len(self._handles):
            self._hear(done)
            late = {n: pace for n, pace in self._paces.items() if n not in done}
            if found := find_late(late):
                raise WorkerError(found[0], f"missed {found[1]}")
        self._all_done.set()
        for listener in listeners:
            listener.join()
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

    def _hear(self, done: dict[str, bytes]) -> None:
        """One thing that a thread has found, if there is any; raised if an error."""
        try:
            name, kind, *content = self._heard.get(timeout=TICK)
        except queue.Empty:
            return
        if kind == "failed":
            raise content[0]
        if kind == "done":
            (done[name],) = content
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
        # Nobody else may ask: an answer that is still on its way would be lost.
        done = False
        try:
            while not done:
                done = self._all_done.wait(TICK)
                self._take(name)  # for the last time once all are done
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


def _start(watch: Callable[[str], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=watch, args=(name,), daemon=True)
    thread.start()
    return thread
