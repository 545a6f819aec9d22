"""The driver of a run on Ray: it starts the actors, and watches over them.

It is a process of its own, so that a run which is local has a network of its own, too:
Ray listens on many ports there, and nobody else can reach them.
"""

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from cdopt_tutorial.engines import process
from cdopt_tutorial.engines.errors import WorkerError, WorkerLost
from cdopt_tutorial.engines.on_actors import Plan
from cdopt_tutorial.engines.on_ray import PATIENCE, OnRay
from cdopt_tutorial.engines.others import LOST
from cdopt_tutorial.engines.pace import Pace, find_late
from cdopt_tutorial.engines.ray_worker import RayWorker, named

TICK = 0.1  # seconds between two looks at the actors
WATCH = 0.5  # and at Ray's own processes
ANSWER = 5.0  # seconds for a cluster to answer at all
DAEMONS = "gcs_server", "raylet"  # of a cluster of this host, which the driver starts
OBJECTS = 200 * 2**20  # bytes of shared memory that local actors hand things over by


def drive(plan: Plan) -> dict[str, bytes]:
    """What the roles returned, by name, pickled; a WorkerError if one failed."""
    with _cluster(plan):
        actors = _Actors(plan)
        try:
            return actors.run()
        except WorkerError as error:
            raise actors.with_host(error) from None


@contextmanager
def _cluster(plan: Plan) -> Iterator[None]:
    """A cluster of this host alone, or one that has been started before."""
    # Actors find each other by their names, among those of one run.
    options = {"namespace": secrets.token_hex(8), "log_to_driver": False}
    if plan.address is None:
        options |= {"num_cpus": len(plan.packed), "object_store_memory": OBJECTS}
        # Ray lets everybody write in its folder, so it lies in one that nobody enters.
        inner = os.path.join(plan.settings.folder, "ray")
        os.mkdir(inner)
        # Of a socket's path the system allows 107 characters, and Ray adds 62.
        folder = os.open(inner, os.O_RDONLY | os.O_DIRECTORY)
        short = f"/proc/{os.getpid()}/fd/{folder}"
        options |= {"include_dashboard": False, "_temp_dir": short}
    reason = "could not be started on this host"
    if plan.address is not None:
        reason = f"can't join the cluster at {plan.address}"
    # Ray itself tries for many minutes, such as where the cluster has TLS and we not.
    late = WorkerError(OnRay.name, f"{reason} in {plan.join_deadline:g} s")
    limit = threading.Timer(plan.join_deadline, process.fail, [late])
    limit.start()
    over = threading.Event()
    if plan.address is None:
        threading.Thread(target=_watch_daemons, args=[over], daemon=True).start()
    try:
        if plan.address not in (None, "auto"):
            host, _, port = plan.address.rpartition(":")
            socket.create_connection((host, int(port)), ANSWER).close()
        ray.init(plan.address, configure_logging=False, **options)
    except (OSError, RuntimeError, RayError) as error:
        raise WorkerError(OnRay.name, reason, str(error)) from None
    finally:
        limit.cancel()
    try:
        yield
    finally:
        over.set()
        ray.shutdown()


def _watch_daemons(over: threading.Event) -> None:
    """Fail the run if a daemon ends: Ray would take a minute, and not say which."""
    here, seen = psutil.Process(), dict[str, psutil.Process]()
    while not over.wait(WATCH):
        if len(seen) < len(DAEMONS):
            with suppress(psutil.Error):  # one ends as we look
                seen |= {each.name(): each for each in here.children()}
                seen = {name: seen[name] for name in DAEMONS if name in seen}
        for name, each in seen.items():
            if not each.is_running() or each.status() == psutil.STATUS_ZOMBIE:
                process.fail(WorkerError(OnRay.name, f"has lost its {name}"))
                return


@dataclass(eq=False)
class _Actor:
    """The driver's view of one worker."""

    handle: Any
    replaceable: bool
    host: str = ""
    playing: Any = None  # what its role will return
    taking: Any = None  # what it has told, if that was asked for
    heard: float = 0.0  # when it last told, by time.monotonic
    away: bool = False  # since its process died, until the next one tells
    pace: Pace | None = None

    @property
    def patience(self) -> float:
        """Seconds without a word, after which it counts as lost."""
        return PATIENCE if self.away else LOST


class _Actors:
    """The actors of one run."""

    def __init__(self, plan: Plan):
        self._deadline = plan.join_deadline
        self._many_hosts = plan.address is not None
        # Whoever is called may call the caller: each needs a thread for each other.
        threads = 2 * len(plan.packed) + 4
        options = {"num_cpus": 1, "max_concurrency": threads}
        self._actors = {}
        for worker in plan.workers():
            replaceable = worker.name in plan.settings.replaceable
            make = RayWorker.options(
                name=worker.name, max_restarts=-1 if replaceable else 0, **options
            )
            self._actors[worker.name] = _Actor(make.remote(worker), replaceable)

    def run(self) -> dict[str, bytes]:
        """What the roles returned, by name, pickled; a WorkerError if one failed."""
        self._await_start()
        done: dict[str, bytes] = {}
        while len(done) < len(self._actors):
            playing = {a.playing: n for n, a in self._actors.items() if n not in done}
            ready, _ = ray.wait(list(playing), timeout=TICK)
            for answer in ready:
                with named(playing[answer]):
                    done[playing[answer]] = ray.get(answer)
            self._listen()
            self._look_at_pace(done)
        for name in 2 * list(self._actors):  # what was asked for, and the rest
            self._take(name)
        return done

    def with_host(self, error: WorkerError) -> WorkerError:
        """The same, which names the host as well, where there are several."""
        actor = self._actors.get(error.worker)
        if actor is None or not self._many_hosts or error.reason.startswith("on "):
            return error
        # Before it has joined, Ray at least knows its address, or what it waits for.
        told = re.search(r"^\s*ip: (\S+)|ipv4:([\d.]+):", error.details, re.M)
        known = actor.host or (told and (told[1] or told[2]))
        reason = f"{error.reason} (on {known})" if known else error.reason
        return type(error)(error.worker, reason, error.details)

    def _await_start(self) -> None:
        limit = time.monotonic() + self._deadline
        for name, actor in self._actors.items():
            try:
                left = max(0.0, limit - time.monotonic())
                with named(name):
                    actor.host = ray.get(actor.handle.host.remote(), timeout=left)
            except TimeoutError:
                reason = f"missed the deadline of {self._deadline:g} s to join"
                raise WorkerError(name, reason) from None
        for actor in self._actors.values():
            actor.playing = actor.handle.play.remote()
            actor.heard = time.monotonic()

    def _listen(self) -> None:
        """Hand on what workers have to tell; look for who has gone."""
        for name, actor in self._actors.items():
            if actor.taking is None:
                actor.taking = actor.handle.take.remote()
            elif ray.wait([actor.taking], timeout=0)[0]:
                self._take(name)
            elif time.monotonic() - actor.heard > actor.patience:
                raise self._silent(name)

    def _silent(self, name: str) -> WorkerError:
        where = f"on {self._actors[name].host} " if self._many_hosts else ""
        silence = f"was not heard of for {self._actors[name].patience:g} s"
        return WorkerError(name, where + silence)

    def _take(self, name: str) -> None:
        actor = self._actors[name]
        asked = actor.taking or actor.handle.take.remote()
        actor.taking = None
        try:
            with named(name):
                told, actor.pace = ray.get(asked, timeout=actor.patience)
        except WorkerLost:
            silent = time.monotonic() - actor.heard > PATIENCE
            if silent or not actor.replaceable:
                raise
            actor.away = True  # it is about to begin anew
            return
        except TimeoutError:
            raise self._silent(name) from None
        actor.away, now = False, time.monotonic()
        actor.heard = now
        if actor.pace is not None:
            actor.pace = actor.pace._replace(until=now + actor.pace.until)
        for kind, *content in told:
            process.report((name, kind, *content))

    def _look_at_pace(self, done: Mapping[str, Any]) -> None:
        paces = {n: a.pace for n, a in self._actors.items() if a.pace and n not in done}
        if found := find_late(paces):
            late, missed = found
            raise WorkerError(late, f"missed {missed}")
