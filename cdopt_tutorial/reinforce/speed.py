"""The speed of each conversation, by its environments and the cost of their steps."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import VectorEnv, VectorWrapper
from joblib import cpu_count
from numpy.typing import NDArray
from torch.futures import Future

from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.one_process import OneProcess
from cdopt_tutorial.engines.seam.reference import LocalRef
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.agent import ReinforceConfig
from cdopt_tutorial.reinforce.system import Training, run_agent

ONE_PROCESS = "one process"
NUM_OBSERVERS = 2

Run = tuple[Callable[..., Training], OneProcess | Workers, ReinforceConfig]
Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Job:
    """A run to time: two observers, or one process with the environments of both."""

    name: str  #: of a conversation, or "one process"
    num_envs: int = 1  #: environments of each observer
    cost_ms: float = 0.0  #: ms of computation added to each step of an environment
    rounds: int = 5  #: of an episode in every environment

    def run(self, device: str = "cpu") -> Run:
        """The agent's role, its engine, and its config."""
        total, alone = NUM_OBSERVERS * self.num_envs, self.name == ONE_PROCESS
        apart = self.name, NUM_OBSERVERS, self.num_envs
        limits = {"max_episodes": total * self.rounds, "device": device}
        how = ("per-step", 1, total) if alone else apart
        config = _Config(*how, cost_ms=self.cost_ms, **limits)
        return run_agent, OneThread() if alone else TorchRPC(), config


@dataclass(frozen=True)
class _Config(ReinforceConfig):
    cost_ms: float = 0.0

    def make_environments(self) -> VectorEnv:
        return _Slow(super().make_environments(), self.cost_ms / 1000)


def measure(
    jobs: Sequence[Job], *, repeats: int, polling: bool, device: str = "cpu"
) -> dict[Job, list[float]]:
    """Environment steps per second of jobs in each repeat, timed in turns.

    `polling` is an option of :func:`~.launch.launch`.
    """
    runs = [job.run(device) for job in jobs]
    paces = in_turns([runs] * repeats, polling=polling)
    return dict(zip(jobs, paces, strict=True))


def pace(found: Training) -> float:
    """Environment steps per second."""
    return found.score.env_steps / found.score.seconds


def in_turns(
    turns: Sequence[Sequence[Run]],
    figure: Callable[[Training], Any] = pace,
    **options: Any,
) -> list[list[Any]]:
    """A figure of each run, such as its pace, in each turn: a list per run.

    All share one launch, turn after turn, so that a slow second hits all alike.
    """
    most = max(config.num_observers for _, _, config in turns[0])
    roles = {"agent": Role(_measure, (turns, figure))}
    roles |= {f"observer{i}": Role(serve) for i in range(most)}
    return launch(roles, rpc_threads=2, deadline=3600, **options)["agent"]


def curves(speeds: Mapping[Job, Sequence[float]], x: str) -> dict[str, list[Curve]]:
    """Curves of the speeds over a field `x` of the jobs, one per repeat, by name."""
    found: dict[str, list[Curve]] = {}
    for name in dict.fromkeys(job.name for job in speeds):
        jobs = [job for job in speeds if job.name == name]
        at, values = [getattr(job, x) for job in jobs], [speeds[job] for job in jobs]
        found[name] = [(at, list(repeat)) for repeat in zip(*values, strict=True)]
    return found


def predicted(
    cost_ms: float, added_ms: float, observers: int, cores: int, own_ms: float
) -> tuple[float, float]:
    """Steps per second of one process, and of observers with one environment each.

    A step takes `cost_ms` plus `own_ms`, and the observers' calls add `added_ms`.
    Observers step at the same time as long as each has a core.
    """
    step = cost_ms + own_ms
    together = step * max(1, observers / cores) + added_ms
    return 1000 / step, 1000 * observers / together


def turned(medians: Mapping[tuple[str, float], float], added_ms: float) -> dict:
    """The numbers of the page's figure: speeds by name and cost, and what calls add."""
    cheap = min(cost for _, cost in medians)
    names = list(dict.fromkeys(name for name, _ in medians))
    return {
        "own": max(0.0, 1000 / medians[ONE_PROCESS, cheap] - cheap),
        "added": max(0.01, added_ms),
        "cores": cpu_count(),
        "names": sorted(names, key=lambda name: name != ONE_PROCESS),
        "measured": [(*key, speed) for key, speed in medians.items()],
    }


def _measure(turns: Sequence[Sequence[Run]], figure: Callable) -> list[list[Any]]:
    found = [[figure(train(*of)) for train, *of in turn] for turn in turns]
    return list(map(list, zip(*found, strict=True)))


class OneThread(OneProcess):
    """One process whose observers play one after another.

    Threads would compete for Python's lock, and cost more than they gain.
    """

    def remote(self, worker: str, make: Callable, *args: Any) -> "_AtOnce":
        return _AtOnce(make(*args))


class _AtOnce(LocalRef):
    def rpc_async(self, timeout: float = 0) -> "_AtOnce":
        return self

    def run_episode(self, agent_rref: LocalRef) -> Future:
        future: Future = Future()
        future.set_result(self.local_value().run_episode(agent_rref))
        return future


class _Slow(VectorWrapper):
    """Environments whose steps take longer, one after another."""

    def __init__(self, env: VectorEnv, cost: float):
        super().__init__(env)
        self._seconds = cost * env.num_envs

    def step(self, actions: NDArray) -> tuple:
        # Occupies its core, as a simulator does; a sleep would leave it to others.
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return self.env.step(actions)
