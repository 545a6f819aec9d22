"""Runs in which a worker is killed, or a host is cut off, at any moment.

Each must end in time and name who was lost, or come to the result that it should have;
and no process may be left on any host.
"""

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import hosts
import psutil
from hosts import NET, RAY_PORT, Hosts, Runs
from running import COMMAND

from cdopt_tutorial.engines.actors.actor import ALONE
from cdopt_tutorial.engines.launcher.launch import JOIN
from cdopt_tutorial.engines.watch.pace import LOST
from cdopt_tutorial.reinforce import ReinforceConfig, run_locally

NARROW = "--embedding 16 --hidden 16"
CONFIG = ReinforceConfig(lr=1e-4, max_episodes=1000)
#: What is trained, and its workers in the order of their ranks.
SYSTEMS = {
    f"reinforce --lr {CONFIG.lr} --max-episodes {CONFIG.max_episodes}":
        "agent observer0 observer1",
    f"rnn --corpus grammar --num-trainers 2 --max-steps 100 {NARROW} --against-local":
        "ps trainer0 trainer1",
    "hybrid --max-steps 100 --against-local": "trainer0 trainer1 master ps",
    "shard --max-steps 50 --width 16 --seq-len 8 --against-local": "rank0 rank1",
}  # fmt: skip
#: Seconds within which all must have ended; workers have ``JOIN`` to join.
LIMITS = {"no loss": 600.0, "kill": JOIN + LOST, "cut": JOIN + ALONE + LOST}
TOLERANCE = 1e-10  # of a result, against one process
STRIDE = 5  # between two moments, so that they differ for each system and worker
GLANCE = 0.05  # seconds between two looks whether all workers are there

_victims = {system: cycle(names.split()) for system, names in SYSTEMS.items()}
_cuts = cycle(f"{how} host{host}" for how in ("cut", "unplug") for host in (1, 2))


@dataclass(frozen=True)
class Way:
    """An engine on some hosts, and how many workers are killed and hosts cut off."""

    engine: str
    hosts: int
    kills: int
    cuts: int = 0

    @property
    def on_cluster(self) -> bool:
        """Whether the hosts have a cluster of Ray."""
        return self.engine == "ray" and self.hosts > 1


WAYS = {
    "torch RPC, one host": Way("rpc", 1, kills=12),
    "torch RPC, two hosts": Way("rpc", 2, kills=14, cuts=12),
    "Ray, one host": Way("ray", 1, kills=12),
    "Ray, two hosts": Way("ray", 2, kills=12, cuts=8),
}
SMOKE = {
    "torch RPC, one host": Way("rpc", 1, kills=1),
    "torch RPC, two hosts": Way("rpc", 2, kills=0, cuts=1),
}


Place = tuple[Hosts, dict[str, str] | None]


@dataclass
class Run:
    """A run, and what became of it."""

    what: str  #: its way, and the kind of its loss
    system: str
    kind: str  #: of the loss, a key of ``LIMITS``
    whom: str = ""  #: the worker, or how which host is cut off; empty for nobody
    moment: float = 0.0  #: when, in seconds since the workers were there
    ended: bool = False  #: before that moment
    seconds: float = 0.0  #: from then until all had ended
    wrong: str = ""  #: what is not as promised
    left: int = 0  #: processes


def disturbed(smoke: bool) -> Iterator[dict[str, Any]]:
    """Lose workers and hosts at moments swept over runs: 50 and 20, or 1 and 1."""
    for name, way in (SMOKE if smoke else WAYS).items():
        lengths: dict[str, float] = {}  # of undisturbed runs, by what is trained
        with _place(way) as whole:
            for run in _planned(name, way):
                run.moment *= lengths.get(run.system, 0.0)
                _until_lost(run, way, whole)
                lengths.setdefault(run.system, run.seconds)
                yield asdict(run)


@contextmanager
def _place(way: Way) -> Iterator[Place]:
    """Hosts for runs, and the environment that a run needs there."""
    with Hosts(way.hosts) as made:
        with made.cluster() if way.on_cluster else nullcontext() as environment:
            yield made, environment


def _planned(name: str, way: Way) -> Iterator[Run]:
    """First those without a loss; the others' moments are shares of their lengths."""
    for system in list(SYSTEMS)[: way.kills + way.cuts]:
        yield Run(f"{name}, no loss", system, "no loss")
    systems = cycle(SYSTEMS)
    for kind, times in ("kill", way.kills), ("cut", way.cuts):
        for number in range(times):
            moment = (number * STRIDE % times + 0.5) / times
            system = next(systems)
            whom = next(_victims[system] if kind == "kill" else _cuts)
            yield Run(f"{name}, {kind}", system, kind, whom, moment)


def _until_lost(run: Run, way: Way, whole: Place) -> None:
    """Run it; again, at half the moment, where it ended before the loss."""
    while True:
        # A host that is cut off is of no use to the next run.
        with _place(way) if run.kind == "cut" else nullcontext(whole) as place:
            _run(run, way, place)
        if not run.ended or run.wrong or run.moment < GLANCE:
            return
        run.moment /= 2


def _run(run: Run, way: Way, place: Place) -> None:
    """Start it, disturb it, wait for its end; note what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        watch = Watch(run, way, place, file)
        try:
            run.ended = not watch.lose()
            lost = time.monotonic()
            watch.wait(lost + LIMITS[run.kind])
            run.seconds = time.monotonic() - lost
        finally:
            outputs = watch.end()
        run.wrong = _wrong(run, way, file, outputs)
    if run.left:
        run.wrong += f" {run.left} processes were left"


class Watch:
    """A run under way, with all that is below it."""

    def __init__(self, run: Run, way: Way, place: Place, file: Path):
        made, environment = place
        self._run, self._way, self._made = run, way, made
        self._before, self._seen = made.processes(), set[psutil.Process]()
        arguments = [*run.system.split(), "--json", str(file)]
        if way.engine == "rpc" and way.hosts > 1:
            workers = [len(each) for each in _share(run.system)]
            self._runs = made.torchrun(workers, *arguments)
        else:
            there = ["--address", f"{NET}.1:{RAY_PORT}"] if way.on_cluster else []
            command = [*COMMAND, *arguments, *there, "--engine", way.engine]
            self._runs = Runs([made.start(1, *command, env=environment)])
        self._agents = {psutil.Process(each.pid) for each in self._runs.agents}

    def lose(self) -> bool:
        """Kill or cut off at the moment; False if the run has ended by then."""
        kind, whom = self._run.kind, self._run.whom
        limit = math.inf
        while self._runs.agents[0].poll() is None:
            self._look()
            wanted = [whom] if kind == "kill" else SYSTEMS[self._run.system].split()
            found = list(map(self._find, wanted))
            if all(found):
                limit = min(limit, time.monotonic() + self._run.moment)
            if all(found) and time.monotonic() >= limit:
                if kind == "kill":
                    found[0].kill()
                elif kind == "cut":
                    how, host = whom.split(" host")
                    getattr(self._made, how)(int(host))
                return True
            time.sleep(GLANCE)
        return False

    def wait(self, limit: float) -> None:
        """Wait until all has ended; torchrun itself waits minutes for a lost host."""
        without = self._agents if "host" in self._run.whom else set()
        while True:
            self._look()
            self._run.left = len(hosts.still_running(self._seen - without, 0))
            if not self._run.left or time.monotonic() > limit:
                return
            time.sleep(0.2)

    def end(self) -> list[tuple[int, str]]:
        """Each host's code and output; what still runs is killed."""
        self._runs.kill()
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        outputs = [agent.communicate()[0] for agent in self._runs.agents]
        codes = [agent.returncode for agent in self._runs.agents]
        return list(zip(codes, outputs, strict=True))

    def _look(self) -> None:
        """Note what there is: of a cluster's own processes only our workers count."""
        found = self._made.processes() - self._before
        if self._way.on_cluster:
            found = {each for each in found if "RayWorker" in _name(each)}
        self._seen |= found.union(hosts.tree(self._runs.agents))

    def _find(self, worker: str) -> psutil.Process | None:
        """The process of a worker, once there is one."""
        is_it = _is_on_ray if self._way.engine == "ray" else _is_launched
        found = (p for p in self._seen if is_it(p, worker) and hosts.runs(p))
        return next(found, None)


def _share(system: str) -> tuple[Sequence[str], Sequence[str]]:
    """Which workers are on which of two hosts, under torchrun."""
    names = SYSTEMS[system].split()
    half = len(names) - len(names) // 2
    return names[:half], names[half:]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def _is_launched(process: psutil.Process, worker: str) -> bool:
    """Whether it is that worker: a process has its worker's name."""
    return _name(process) == worker


def _is_on_ray(process: psutil.Process, worker: str) -> bool:
    """Whether it is that worker, which keeps its pace in memory of its name."""
    with suppress(OSError):  # it has ended, or closes a file: the next look is soon
        files = Path(f"/proc/{process.pid}/fd").iterdir()
        return f"/memfd:{worker} (deleted)" in map(os.readlink, files)
    return False


def _wrong(run: Run, way: Way, file: Path, outputs: list[tuple[int, str]]) -> str:
    """What is not as promised: neither a right result nor the name of who was lost."""
    if file.exists():  # which is written at the end
        return "" if _is_right(file) else f"another result: {outputs}"
    if run.ended or not run.whom:
        return f"failed by itself: {outputs}"
    expected = _expected(run, way, len(outputs))
    both = zip(expected, outputs, strict=True)
    named = all(re.search(line, text, re.M) for line, (_, text) in both)
    failed = run.kind == "cut" or {code for code, _ in outputs} == {1}
    return "" if named and failed else f"said {outputs}, expected {expected}"


def _expected(run: Run, way: Way, outputs: int) -> list[str]:
    """What each output must say of whom was lost."""
    if run.kind == "cut":
        silent = r"on host{h} has not been heard from for 15 s"
        if way.engine == "ray":  # whose workers have no host before they have joined
            gone = rf"can't be reached \(on (host{{h}}|{NET}.{{h}})\)"
            silent = rf"({silent}|missed the deadline of {JOIN:g} s to join|{gone})"
        return [rf"^cdopt-tutorial: \w+ {silent.format(h=h)}" for h in (2, 1)[:outputs]]
    reason = "died" if way.engine == "ray" else "was killed (by SIGKILL|as it started)"
    line = f"^cdopt-tutorial: {run.whom} {reason}"
    if way.hosts == 1:
        return [line]
    if way.engine == "ray":
        return [rf"{line} \(on (host\d|{NET}\.\d)\)"]
    host = 1 if run.whom in _share(run.system)[0] else 2
    return [line + ("" if each == host else rf" \(on host{host}\)") for each in (1, 2)]


def _is_right(file: Path) -> bool:
    """Whether a result is that of one process."""
    found = json.loads(file.read_text())
    if "rewards" in found:
        return found["rewards"] == _rewards()
    return found["max_parameter_difference"] <= TOLERANCE


@cache
def _rewards() -> list[float]:
    return run_locally(CONFIG).score.rewards
