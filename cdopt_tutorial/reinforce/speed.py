"""How many steps observers take per second, also where an environment is slow."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from cdopt_tutorial.calls import alone
from cdopt_tutorial.reinforce.agent import ReinforceConfig
from cdopt_tutorial.reinforce.system import Training, run_agent
from cdopt_tutorial.run import Role, launch, serve


@dataclass(frozen=True)
class SlowConfig(ReinforceConfig):
    """Settings of a run whose environments compute for longer, one after another."""

    cost_ms: float = 0.0  #: ms added to a step of each environment

    def make_environments(self) -> VectorEnv:
        return _Slow(super().make_environments(), self.cost_ms)


class _Slow(VectorWrapper):
    def __init__(self, env: VectorEnv, cost_ms: float):
        super().__init__(env)
        self._seconds = env.num_envs * cost_ms / 1000

    def step(self, actions: NDArray) -> tuple:
        # Occupies its core, as a simulator does; a sleep would leave it to others.
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return self.env.step(actions)


def run_alone(config: ReinforceConfig) -> Training:
    """The agent's role where its observers are in its process, and take turns.

    Threads would compete for Python's lock, and cost more than they gain.
    """
    with alone(at_once=True):
        return run_agent(config)


def pace(training: Training) -> float:
    """Environment steps per second."""
    return training.score.env_steps / training.score.seconds


def measure(
    runs: Sequence[tuple[Callable[..., Training], ReinforceConfig]],
    repeats: int,
    figure: Callable[[Training], Any] = pace,
    polling: bool = False,
) -> list[list[Any]]:
    """A figure of each run, such as its pace, in each repeat, which has its own seed.

    A run is the agent's role and its config. All share one launch, turn after turn, so
    that a slow second hits all alike; it polls, or not.
    """
    most = max(config.num_observers for _, config in runs)
    roles = {"agent": Role(_measure, (runs, repeats, figure))}
    roles |= {f"observer{i}": Role(serve) for i in range(most)}
    return launch(roles, rpc_threads=2, deadline=3600, polling=polling)["agent"]


def _measure(runs: Sequence, repeats: int, figure: Callable) -> list[list[Any]]:
    turns = [
        [figure(role(replace(of, seed=of.seed + turn))) for role, of in runs]
        for turn in range(repeats)
    ]
    return list(map(list, zip(*turns, strict=True)))
