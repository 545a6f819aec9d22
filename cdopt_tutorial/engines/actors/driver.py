"""Engines with actors: a driver, a process of its own, starts and watches over them.

``launch`` runs it in its network, so a run on this host has a network of its own here,
too. The outcome is what the roles returned, or a WorkerError that names who failed. The
engine ``on_ray`` says only how Ray makes and calls actors.
"""

import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from cdopt_tutorial import torchrun
from cdopt_tutorial.engines.actors.actor import Actors, WorkerPlan
from cdopt_tutorial.engines.launcher import pack, process
from cdopt_tutorial.engines.launcher.group import Group, show_line
from cdopt_tutorial.engines.launcher.launch import Role
from cdopt_tutorial.engines.torchrun import store
from cdopt_tutorial.engines.watch.errors import WorkerError
from cdopt_tutorial.engines.watch.pace import TICK, Watched, find_late
from cdopt_tutorial.engines.workers import Workers

MOMENT = 0.01  # seconds between two looks at workers that are done


@dataclass(frozen=True)
class OnActors(Workers, ABC):
    """Runs a system on actors; a ValueError if what they need is not installed."""

    way: str = field(default="cut", init=False)  # there is no other
    name: ClassVar[str]  #: also of its driver, its package and our extra
    many_hosts: ClassVar[bool] = False  #: whether messages name hosts

    def __post_init__(self):
        name = self.name
        if find_spec(name) is None:
            missing = f"needs {name.capitalize()}, which is not here"
            install = f"pip install 'cdopt-tutorial[{name}]'"
            raise ValueError(f"the engine {name} {missing}: {install}")
        if torchrun.is_here():
            itself = "starts its workers itself, not torchrun"
            raise ValueError(f"the engine {name} {itself}")

    @abstractmethod
    def actors(self, plans: Sequence[WorkerPlan]) -> AbstractContextManager[Actors]:
        """The actors of a run, while it lasts; called in the driver's process."""

    def launch(self, roles: Mapping[str, Role], **options: Any) -> dict[str, Any]:
        """Start the roles as :func:`.launch` does; return what each returned, by name.

        Options of torch RPC have no effect here: threads, polling; a trace or a wire is
        refused.
        """
        for name in ("trace", "wire"):
            if options.get(name) is not None:
                only = f"and not for the engine {self.name}"
                raise ValueError(f"{name} is for torch RPC, {only}")
        return super().launch(roles, play=self._play, **options)

    def _play(
        self,
        settings: process.Settings,
        packed: Mapping[str, bytes],
        on_report: Callable[[str, Any], None] | None,
        deadlines: tuple[float, float],
    ) -> dict[str, tuple[Any, None, None]]:
        def pass_on(_: str, message: tuple) -> None:
            worker, kind, *content = message
            if kind == "output":
                show_line(worker, *content)
            elif on_report is not None:
                on_report(worker, process.unpickled(worker, "reported", *content))

        role = Role(_drive, (self, settings, packed, deadlines[1]))
        content, modules = pack.pack({self.name: (None, role)})
        alone = replace(settings, world_size=1, modules=modules)
        done = Group(alone, content, pass_on).run(*deadlines)
        results, _, _ = done[self.name]
        return {
            name: (process.unpickled(name, "returned", result), None, None)
            for name, result in results.items()
        }


def _drive(
    engine: OnActors,
    settings: process.Settings,
    packed: Mapping[str, bytes],
    join_deadline: float,
) -> dict[str, bytes]:
    """The driver's role: what the workers' roles returned, by name, pickled."""
    _guard()
    # What the library prints goes into the log, which a failure shows.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w")
    # Process groups form at the first worker.
    settings = replace(settings, init_method=f"{store.NETWORK}://{next(iter(packed))}")
    given = sys.path, join_deadline
    plans = [WorkerPlan(settings, *each, *given) for each in packed.items()]
    with engine.actors(plans) as actors:
        return Driver(actors, packed, join_deadline, engine.many_hosts).run()


def _guard() -> None:
    """Start a process that kills this one's group as soon as this one has ended.

    If this one were killed, Ray's agents would stay a minute.
    """
    read, _ = os.pipe()  # only this process has the other end, and never closes it
    command = ["sh", "-c", 'read _; kill -9 "-$0"', str(os.getpgid(0))]
    moved = [(os.POSIX_SPAWN_DUP2, read, 0)]
    os.posix_spawnp("sh", command, os.environ, setsid=True, file_actions=moved)
    os.close(read)


@dataclass(eq=False)
class _Actor(Watched):
    """The driver's view of one worker."""

    taking: futures.Future | None = None  # of a call of ``take``
    takes: int = 0  # calls answered
    result: bytes = b""


class Driver:
    """Has the actors of one run play its roles, and watches over them."""

    def __init__(
        self,
        actors: Actors,
        names: Iterable[str],
        join_deadline: float,
        many_hosts: bool = False,
    ):
        self._actors, self._join_deadline = actors, join_deadline
        self._many_hosts = many_hosts
        self._workers = [_Actor(name) for name in names]
        self._begin = time.monotonic()

    def run(self) -> dict[str, bytes]:
        """What the roles returned, by name, pickled; a WorkerError if one failed."""
        try:
            for worker in self._workers:
                worker.taking = self._ask(worker, "take")
            self._until(lambda worker: worker.phase == "running")
            for worker in self._workers:
                self._ask(worker, "play")
            self._until(lambda worker: worker.phase == "done")
            # Messages on their way when all were done, and those since.
            last = {worker: worker.takes + 2 for worker in self._workers}
            self._until(lambda worker: worker.takes >= last[worker], MOMENT)
        except WorkerError as error:
            raise self._with_host(error) from None
        return {worker.name: worker.result for worker in self._workers}

    def _ask(self, worker: _Actor, method: str) -> futures.Future:
        return self._actors.future(self._actors.ask(worker.name, method))

    def _until(self, reached: Callable[[_Actor], bool], pause: float = TICK) -> None:
        """Take messages until each worker is so far; a WorkerError if one is late."""
        while not all(map(reached, self._workers)):
            time.sleep(pause)
            for worker in self._workers:
                if worker.taking.done():
                    self._take(worker)
            if late := find_late(self._workers, self._begin, self._join_deadline):
                raise WorkerError(*late)

    def _take(self, worker: _Actor) -> None:
        """Handle a worker's messages, and call it again."""
        with self._actors.named(worker.name):
            messages, pace = worker.taking.result()
        worker.heard = time.monotonic()
        if pace is not None:
            worker.pace = pace._replace(until=worker.heard + pace.until)
        for message in messages:
            self._handle(worker, *message)
        worker.takes += 1
        worker.taking = self._ask(worker, "take")

    def _handle(self, worker: _Actor, kind: str, *content: Any) -> None:
        match kind, content:
            case "phase", (phase, host):
                worker.host = host if self._many_hosts else ""
                worker.phase = phase
            case "result", (result,):
                worker.phase, worker.result = "done", result
            case "failed", (error,):
                raise error
            case _:
                process.report((worker.name, kind, *content))

    def _with_host(self, error: WorkerError) -> WorkerError:
        """The same error with the worker's host, where there are several."""
        hosts = {worker.name: worker.host for worker in self._workers}
        by_name = error.worker in hosts and self._many_hosts
        if not by_name or error.reason.startswith("on "):
            return error
        # Of a worker that has not joined, Ray's own message may have the address.
        found = re.search(r"^\s*ip: (\S+)|ipv4:([\d.]+):", error.details, re.M)
        known = hosts[error.worker] or (found and (found[1] or found[2]))
        reason = f"{error.reason} (on {known})" if known else error.reason
        return type(error)(error.worker, reason, error.details)
