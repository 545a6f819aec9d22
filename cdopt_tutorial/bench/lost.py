"""What becomes of runs of which a worker is killed, or a host cut off, at any moment.

Each must end in time and name who was lost, or come to the result that it should have;
and no process may be left on any host.
"""

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import cycle
from pathlib import Path

import psutil

from cdopt_tutorial.bench import hosts
from cdopt_tutorial.bench.hosts import NET, RAY_PORT, Hosts, Runs, tree
from cdopt_tutorial.bench.rows import Measured, Progress, Row
from cdopt_tutorial.engines.on_ray import PATIENCE
from cdopt_tutorial.engines.others import LOST
from cdopt_tutorial.engines.reference import LocalRef
from cdopt_tutorial.reinforce import Agent, Observer, ReinforceConfig, Score
from cdopt_tutorial.reinforce.steady import Anew, Lost

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
#: Seconds within which all must have ended; of a run that goes on, besides its own.
LIMITS = {"no loss": PATIENCE, "kill": PATIENCE, "cut": LOST + 15}
TOLERANCE = 1e-10  # of a result, against one process
STRIDE = 5  # between two moments, so that they differ for each system and worker

_victims = {system: cycle(names.split()) for system, names in SYSTEMS.items()}
_cuts = cycle(f"{how} host{host}" for how in ("cut", "unplug") for host in (1, 2))


@dataclass(frozen=True)
class Way:
    """An engine on some hosts, and how many workers are killed and hosts cut off."""

    engine: str
    hosts: int
    kills: int
    cuts: int = 0


WAYS = {
    "torch RPC, one host": Way("rpc", 1, kills=12),
    "torch RPC, two hosts": Way("rpc", 2, kills=14, cuts=12),
    "Ray, one host": Way("ray", 1, kills=12),
    "Ray, two hosts": Way("ray", 2, kills=12, cuts=8),
}
SMOKE = {
    "torch RPC, one host": Way("rpc", 1, kills=1),
    "torch RPC, two hosts": Way("rpc", 2, kills=1, cuts=1),
}


@dataclass
class Found:
    """What became of one run."""

    way: str
    system: str
    kind: str  #: of the loss, a key of ``LIMITS``
    whom: str = ""  #: the worker, or how which host was cut off; if that came about
    moment: float = 0.0  #: when, in seconds after the run's begin
    seconds: float = 0.0  #: from then until all had ended
    wrong: str = ""  #: what is not as promised
    left: int = 0  #: processes


def check() -> None:
    """Raise a ValueError where no hosts can be made."""
    hosts.check()


def measure(progress: Progress, smoke: bool = False) -> Measured:
    """Lose workers and hosts at moments swept over runs: 50 and 20, or 2 and 1."""
    found: list[Found] = []
    for name, way in (SMOKE if smoke else WAYS).items():
        lengths: dict[str, float] = {}
        for run in _planned(name, way, list(SYSTEMS)[: 1 if smoke else None]):
            run.moment *= lengths.get(run.system, 0.0)
            with tempfile.TemporaryDirectory() as folder:
                _run(run, way, Path(folder, "found.json"))
            lengths.setdefault(run.system, run.seconds)  # of that without a loss
            found.append(run)
            progress(json.dumps(asdict(run)))  # so that nothing is lost on the way
    return _rows(found), {"runs": [asdict(each) for each in found]}


def _planned(name: str, way: Way, systems: Sequence[str]) -> Iterator[Found]:
    """First each system without a loss; moments are shares of that run's length."""
    for kind, times in (
        ("no loss", len(systems)),
        ("kill", way.kills),
        ("cut", way.cuts),
    ):
        for number in range(times):
            run = Found(name, systems[number % len(systems)], kind)
            run.moment = (number * STRIDE % times + 0.5) / times
            if kind == "kill":
                run.whom = next(_victims[run.system])
            elif kind == "cut":
                run.whom = next(_cuts)
            yield run


def _rows(found: Sequence[Found]) -> list[Row]:
    """Of each way and kind: how many runs, what became of them, how long it took."""
    rows = []
    for way, kind in dict.fromkeys((each.way, each.kind) for each in found):
        runs = [each for each in found if (each.way, each.kind) == (way, kind)]
        seconds = [each.seconds for each in runs]
        figures = {
            "runs": (len(runs), "", "runs"),
            "as promised": (sum(not each.wrong for each in runs), "", "runs"),
            "processes left": (sum(each.left for each in runs), "", "runs"),
            "median time": (statistics.median(seconds), "s", "median time"),
            "longest time": (max(seconds), "s", "median time"),
        }
        for figure, (value, unit, against) in figures.items():
            name, base = (f"{way}, {kind}: {each}" for each in (figure, against))
            rows.append(Row(name, value, unit, base, value / figures[against][0]))
    return rows


def _run(run: Found, way: Way, file: Path) -> None:
    """Start it, lose whom it is to lose, wait for its end; note what came of it."""
    with _started(run, way, file) as started:
        begun = time.monotonic()
        if run.kind != "no loss" and not started.lose(run):
            run.whom = ""  # it had ended
        lost = time.monotonic()
        run.moment = lost - begun if run.kind != "no loss" else 0.0
        run.left = started.wait(LIMITS[run.kind], torchrun=not run.whom.count("host"))
        run.seconds = time.monotonic() - lost
        told = started.end()
    run.wrong = _wrong(run, way, file, told)
    if run.left:
        run.wrong += f" {run.left} processes were left"


@contextmanager
def _started(run: Found, way: Way, file: Path) -> Iterator["_Started"]:
    names = SYSTEMS[run.system].split()
    arguments, environment = (
        [*run.system.split(), "--json", str(file)],
        dict(os.environ),
    )
    with Hosts(way.hosts) as made:
        on_cluster = way.engine == "ray" and way.hosts > 1
        with made.cluster() if on_cluster else nullcontext() as environment:
            before = made.processes()
            if way.engine == "ray":
                arguments += ["--engine", "ray"]
            if on_cluster:
                arguments += ["--address", f"{NET}.1:{RAY_PORT}"]
            if way.engine == "rpc" and way.hosts > 1:
                runs = made.torchrun(_share(len(names)), *arguments)
            else:
                command = [sys.executable, "-m", "cdopt_tutorial", *arguments]
                runs = Runs([made.start(1, *command, env=environment)])
            started = _Started(way, made, runs, before, names)
            try:
                yield started
            finally:
                started.kill()


def _share(workers: int) -> list[int]:
    """How many of them each of two hosts has."""
    return [workers - workers // 2, workers // 2]


class _Started:
    """A run under way, with all that is below it."""

    def __init__(self, way, made: Hosts, runs: Runs, before: set, names: list[str]):
        self._way, self._made, self._runs = way, made, runs
        self._before, self._names = before, names
        self._agents = [psutil.Process(each.pid) for each in runs.agents]
        self._seen: set[psutil.Process] = set()

    def lose(self, run: Found) -> bool:
        """Kill or cut off at the moment, or as soon as there is whom; False if late."""
        limit = time.monotonic() + run.moment
        while self._runs.agents[0].poll() is None:
            self._look()
            if time.monotonic() > limit:
                if run.kind == "cut" and self._find(self._names[-1]):
                    how, host = run.whom.split(" host")
                    getattr(self._made, how)(int(host))
                    return True
                if run.kind == "kill" and (victim := self._find(run.whom)):
                    victim.kill()
                    return True
            time.sleep(0.05)
        return False

    def wait(self, seconds: float, torchrun: bool) -> int:
        """Wait so long until all has ended; how many processes have not.

        Torchrun itself waits for hosts that it has lost, and that is not ours to say.
        """
        limit = time.monotonic() + seconds
        while True:
            self._look()
            ours = self._seen - (set() if torchrun else set(self._agents))
            left = hosts.still_running(ours, 0)
            if not left or time.monotonic() > limit:
                return len(left)
            time.sleep(0.2)

    def end(self) -> list[tuple[int, str]]:
        """Each host's code and output; what still runs is killed."""
        self.kill()
        told = [agent.communicate()[0] for agent in self._runs.agents]
        return [(a.returncode, t) for a, t in zip(self._runs.agents, told, strict=True)]

    def kill(self) -> None:
        self._runs.kill()
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _look(self) -> None:
        """Note what there is: of a cluster's own processes only our workers count."""
        self._seen |= set(tree(self._runs.agents))
        for process in self._made.processes() - self._before:
            with suppress(psutil.NoSuchProcess):
                if self._way.engine == "rpc" or "RayWorker" in process.name():
                    self._seen.add(process)

    def _find(self, worker: str) -> psutil.Process | None:
        """The process of a worker, once there is one."""
        with suppress(psutil.NoSuchProcess, IndexError):
            if self._way.engine == "ray":
                return next(filter(lambda p: _holds(p, worker), self._seen), None)
            rank = self._names.index(worker)
            if self._way.hosts == 1:
                return _grandchildren(self._agents[0])[rank]
            first = _share(len(self._names))[0]
            host, number = (2, rank - first) if rank >= first else (1, rank)
            return _grandchildren(self._runs.ranks(host)[number])[0]
        return None


def _grandchildren(process: psutil.Process) -> list[psutil.Process]:
    """In the order of their start: the workers that a launcher's fork server has."""
    return [each for child in process.children() for each in child.children()]


def _holds(process: psutil.Process, worker: str) -> bool:
    """Whether it is that worker on Ray, whose pace is kept in memory of its name."""
    with suppress(OSError):
        for each in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(each) == f"/memfd:{worker} (deleted)":
                    return hosts.runs(process)
    return False


def _wrong(run: Found, way: Way, file: Path, told: list[tuple[int, str]]) -> str:
    """What is not as promised: neither who was lost nor the result that should be."""
    if file.exists() and (
        run.kind == "cut" or told[0][0] == 0 or "reinforce" in run.system
    ):
        return "" if _is_right(file, told[0][1]) else f"another result: {told}"
    if not run.whom:
        return f"failed by itself: {told}"
    expected = _expected(run, way, len(told))
    both = zip(expected, told, strict=True)
    named = all(re.search(line, text, re.M) for line, (_, text) in both)
    failed = run.kind == "cut" or {code for code, _ in told} == {1}
    return "" if named and failed else f"said {told}, expected {expected}"


def _expected(run: Found, way: Way, outputs: int) -> list[str]:
    """What each output must say of whom was lost."""
    if run.kind == "cut":
        other = [2, 1][:outputs]
        silent = "was not heard of for 15 s"
        return [rf"^cdopt-tutorial: \w+ on host{h} {silent}" for h in other]
    reason = "died" if way.engine == "ray" else "was killed (by SIGKILL|as it started)"
    line = f"^cdopt-tutorial: {run.whom} {reason}"
    names = SYSTEMS[run.system].split()
    if way.hosts == 1:
        return [line]
    if way.engine == "ray":
        return [rf"{line} \(on host\d\)"]
    host = 1 + (names.index(run.whom) >= _share(len(names))[0])
    return [line + ("" if each == host else rf" \(on host{host}\)") for each in (1, 2)]


def _is_right(file: Path, told: str) -> bool:
    """Whether a result is that of one process, which loses the same observers."""
    found = json.loads(file.read_text())
    if "rewards" not in found:
        return found["max_parameter_difference"] <= TOLERANCE
    lost = re.findall(r"(\w+) died and is replaced: .* in round (\d+)", told)
    return found["rewards"] == without(CONFIG, tuple(Lost(n, int(r)) for n, r in lost))


@cache
def without(config: ReinforceConfig, lost: tuple[Lost, ...]) -> list[float]:
    """Rewards in one process of a training in which these observers are lost."""
    agent, score = Agent(config), Score()
    observers = [Observer(number, config) for number in range(config.num_observers)]
    lives = [0] * config.num_observers
    while len(score.rewards) < config.max_episodes and not score.solved:
        batch = []
        for number, observer in enumerate(observers):
            if Lost(f"observer{number}", score.rounds + 1) in lost:
                lives[number] += 1
                anew = Anew(**vars(config), life=lives[number])
                observers[number] = Observer(number, anew)
            else:
                ends = observer.run_episode(LocalRef(agent))
                batch.append(agent._episodes(number, *ends))
        agent.finish_episode(batch)
        score.add(batch)
    return score.rewards
