"""What becomes of runs of which a worker is killed, or a host cut off, at any moment.

Each must end in time and name who was lost, or come to the result that it should have;
and no process may be left on any host.
"""

import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path

import torch
from hosts import NET, Hosts

from cdopt_tutorial.bench.rows import Measured, Progress, Row
from cdopt_tutorial.engines.actors.actor import ALONE
from cdopt_tutorial.engines.launcher.launch import JOIN
from cdopt_tutorial.engines.seam.reference import LocalRef
from cdopt_tutorial.engines.torchrun.peers import LOST
from cdopt_tutorial.reinforce import Agent, Observer, ReinforceConfig, Score
from cdopt_tutorial.reinforce.steady import Lost
from sweeps.disturbed import GLANCE, Disturbed, Environment, Way, place, share

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
#: Seconds within which all must have ended; a minute is what workers have to join, or,
#: on Ray, to be replaced.
LIMITS = {"no loss": 600.0, "kill": JOIN + LOST, "cut": JOIN + ALONE + LOST}
TOLERANCE = 1e-10  # of a result, against one process
STRIDE = 5  # between two moments, so that they differ for each system and worker

_victims = {system: cycle(names.split()) for system, names in SYSTEMS.items()}
_cuts = cycle(f"{how} host{host}" for how in ("cut", "unplug") for host in (1, 2))


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


@dataclass
class Found:
    """What became of one run."""

    way: str
    system: str
    kind: str  #: of the loss, a key of ``LIMITS``
    whom: str = ""  #: the worker, or how which host was cut off
    moment: float = 0.0  #: when, in seconds since there was whom it is about
    seconds: float = 0.0  #: from then until all had ended
    wrong: str = ""  #: what is not as promised
    left: int = 0  #: processes


def measure(progress: Progress, smoke: bool = False) -> Measured:
    """Lose workers and hosts at moments swept over runs: 50 and 20, or 1 and 1."""
    found: list[Found] = []
    for name, way in (SMOKE if smoke else WAYS).items():
        lengths: dict[str, float] = {}  # of undisturbed runs, by what is trained
        with place(way) as whole:
            for planned in _planned(name, way):
                planned.moment *= lengths.get(planned.system, 0.0)
                run = _until_lost(planned, way, whole)
                lengths.setdefault(run.system, run.seconds)
                found.append(run)
                progress(json.dumps(asdict(run)))  # so that nothing is lost on the way
    return _rows(found), {"runs": [asdict(each) for each in found]}


def _planned(name: str, way: Way) -> Iterator[Found]:
    """First those without a loss; the others' moments are shares of their lengths."""
    losses = way.kills + way.cuts
    for system in list(SYSTEMS)[:losses]:
        yield Found(name, system, "no loss")
    systems = cycle(SYSTEMS)
    for kind, times in ("kill", way.kills), ("cut", way.cuts):
        for number in range(times):
            moment = (number * STRIDE % times + 0.5) / times
            system = next(systems)
            whom = next(_victims[system] if kind == "kill" else _cuts)
            yield Found(name, system, kind, whom, moment)


def _rows(found: Sequence[Found]) -> list[Row]:
    """Of each way and kind: how many runs, what became of them, how long it took."""
    rows = []
    for way, kind in dict.fromkeys((each.way, each.kind) for each in found):
        runs = [each for each in found if (each.way, each.kind) == (way, kind)]
        figures = {"runs": len(runs), "as promised": sum(not r.wrong for r in runs)}
        figures["processes left"] = sum(each.left for each in runs)
        figures["longest time in s"] = max(each.seconds for each in runs)
        for figure, value in figures.items():
            name = f"{way}, {kind}: {figure}"
            rows.append(Row(name, value, "", name, 1.0, value, value))
    return rows


def _until_lost(planned: Found, way: Way, whole: tuple[Hosts, Environment]) -> Found:
    """What becomes of it; again, at half the moment, where it ends before the loss."""
    while True:
        run = replace(planned)
        # A host that is cut off is of no use to the next run.
        with place(way) if run.kind == "cut" else nullcontext(whole) as here:
            _run(run, way, *here)
        too_short = planned.moment < GLANCE  # to lose anybody in it
        if run.whom == planned.whom or run.wrong or too_short:
            return run
        planned.moment /= 2


def _run(run: Found, way: Way, made: Hosts, environment: Environment) -> None:
    """Start it, lose whom it is to lose, wait for its end; note what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        file, names = Path(folder, "found.json"), SYSTEMS[run.system].split()
        arguments = [*run.system.split(), "--json", str(file)]
        disturbed = Disturbed(way, made, environment, names, arguments)
        try:
            if not disturbed.lose(run.kind, run.whom, run.moment):
                run.whom = ""
            lost = time.monotonic()
            # Torchrun itself waits for hosts that it has lost, and for minutes.
            run.left = disturbed.wait(LIMITS[run.kind], torchrun="host" not in run.whom)
            run.seconds = time.monotonic() - lost
        finally:
            told = disturbed.end()
        run.wrong = _wrong(run, way, file, told)
    if run.left:
        run.wrong += f" {run.left} processes were left"


def _wrong(run: Found, way: Way, file: Path, told: list[tuple[int, str]]) -> str:
    """What is not as promised: neither who was lost nor the result that should be."""
    if file.exists():  # which is written at the end
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
    host = 1 if run.whom in share(SYSTEMS[run.system].split())[0] else 2
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
    torch.set_num_threads(1)  # as the workers have
    agent, score = Agent(config), Score()
    observers = [Observer(number, config) for number in range(config.num_observers)]
    numbers = list(range(config.num_observers))
    while len(score.rewards) < config.max_episodes and not score.solved:
        batch = []
        for number, observer in enumerate(observers):
            if Lost(f"observer{number}", score.rounds + 1) in lost:
                numbers[number] += config.num_observers
                observers[number] = Observer(numbers[number], config)
            else:
                ends = observer.run_episode(LocalRef(agent))
                batch.append(agent._actors[number].episodes(*ends))
        agent.finish_episode(batch)
        score.add(batch)
    return score.rewards
