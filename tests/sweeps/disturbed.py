"""A run on one host or two, of which a worker is killed or a host is cut off."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import hosts
import psutil
from hosts import NET, RAY_PORT, Hosts, Runs

Environment = dict[str, str] | None
GLANCE = 0.05  # seconds between two looks whom there is to lose


@dataclass(frozen=True)
class Way:
    """An engine on some hosts, and how many workers are killed and hosts cut off."""

    engine: str
    hosts: int
    kills: int
    cuts: int = 0

    @property
    def on_cluster(self) -> bool:
        """Whether Ray has been started on the hosts before."""
        return self.engine == "ray" and self.hosts > 1

    @property
    def by_torchrun(self) -> bool:
        """Whether torchrun starts the workers."""
        return self.engine == "rpc" and self.hosts > 1


@contextmanager
def place(way: Way) -> Iterator[tuple[Hosts, Environment]]:
    """Hosts for runs, and the environment that a run needs there."""
    with Hosts(way.hosts) as made:
        with made.cluster() if way.on_cluster else nullcontext() as environment:
            yield made, environment


def share(names: Sequence[str]) -> list[list[str]]:
    """Which workers are on which of two hosts, under torchrun."""
    half = len(names) - len(names) // 2
    return [list(names[:half]), list(names[half:])]


class Disturbed:
    """A run under way, with all that is below it."""

    def __init__(
        self, way: Way, made: Hosts, env: Environment, names: list[str], args: list[str]
    ):
        self._way, self._made, self._names = way, made, names
        self._before, self._seen = made.processes(), set[psutil.Process]()
        if way.by_torchrun:
            numbers = [len(each) for each in share(names)]
            self._runs = made.torchrun(numbers, *args)
        else:
            there = ["--address", f"{NET}.1:{RAY_PORT}"] if way.on_cluster else []
            command = [sys.executable, "-m", "cdopt_tutorial", *args, *there]
            self._runs = Runs(
                [made.start(1, *command, "--engine", way.engine, env=env)]
            )
        self._agents = {psutil.Process(each.pid) for each in self._runs.agents}

    def lose(self, kind: str, whom: str, moment: float) -> bool:
        """So many seconds after there is whom; False if the run had ended by then.

        To "kill" a worker, or for a "cut", to do that or "unplug" to a host, such as
        "cut host2", after all workers are there. For "no loss" nothing is done.
        """
        limit = None
        while self._runs.agents[0].poll() is None:
            self._look()
            found = list(map(self._find, [whom] if kind == "kill" else self._names))
            if all(found) and limit is None:
                limit = time.monotonic() + moment
            if all(found) and time.monotonic() >= limit:
                if kind == "kill":
                    found[0].kill()
                elif kind == "cut":
                    how, host = whom.split(" host")
                    getattr(self._made, how)(int(host))
                return True
            time.sleep(GLANCE)
        return False

    def wait(self, seconds: float, torchrun: bool) -> int:
        """Wait so long until all has ended, torchrun too or not; how many have not."""
        limit = time.monotonic() + seconds
        while True:
            self._look()
            ours = self._seen - (set() if torchrun else self._agents)
            left = hosts.still_running(ours, 0)
            if not left or time.monotonic() > limit:
                return len(left)
            time.sleep(0.2)

    def end(self) -> list[tuple[int, str]]:
        """Each host's code and output; what still runs is killed."""
        self._runs.kill()
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        told = [agent.communicate()[0] for agent in self._runs.agents]
        return [(a.returncode, t) for a, t in zip(self._runs.agents, told, strict=True)]

    def _look(self) -> None:
        """Note what there is: of a cluster's own processes only our workers count."""
        self._seen |= set(hosts.tree(self._runs.agents))
        for process in self._made.processes() - self._before:
            with suppress(psutil.NoSuchProcess):
                if not self._way.on_cluster or "RayWorker" in process.name():
                    self._seen.add(process)

    def _find(self, worker: str) -> psutil.Process | None:
        """The process of a worker, once there is one."""
        is_it = _is_on_ray if self._way.engine == "ray" else _is_launched
        return next((p for p in self._seen if is_it(p, worker)), None)


def _is_launched(process: psutil.Process, worker: str) -> bool:
    """Whether it is that worker, by whose name its process goes."""
    with suppress(psutil.NoSuchProcess):
        return hosts.runs(process) and process.name() == worker
    return False


def _is_on_ray(process: psutil.Process, worker: str) -> bool:
    """Whether it is that worker, whose pace is kept in memory of its name."""
    with suppress(OSError):
        for each in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(each) == f"/memfd:{worker} (deleted)":
                    return hosts.runs(process)
    return False
