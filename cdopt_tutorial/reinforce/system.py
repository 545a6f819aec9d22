"""Chapter 1's system: train an agent with its observers until CartPole is solved."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import gymnasium
from torch import Tensor
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial import checks
from cdopt_tutorial.engines import Role, serve
from cdopt_tutorial.engines.one_process import OneProcess
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.agent import (
    ENVIRONMENT,
    Agent,
    Observer,
    ReinforceConfig,
)
from cdopt_tutorial.reinforce.learner import Episodes
from cdopt_tutorial.reinforce.steady import SteadyAgent

SOLVED_OVER = 100  # episodes whose mean reward decides
AVERAGING = 0.05  # weight of the newest episode in the original's running reward


@dataclass(frozen=True)
class Round:
    """What the agent reports after each round."""

    number: int  #: of rounds so far
    episodes: int  #: so far
    env_steps: int  #: so far
    last_reward: float  #: mean of the round's episodes
    running_reward: float  #: the original's
    mean_reward: float  #: of the last 100 episodes


@dataclass
class Score:
    """How well the agent does, and whether its environment's authors call it solved."""

    #: total reward of every episode, in the order of the observers.
    rewards: list[float] = field(default_factory=list)
    running_reward: float = 0.0  #: the original's: an exponential average, from 0
    env_steps: int = 0  #: steps taken in all environments
    rounds: int = 0  #: times that the agent has learned
    seconds: float = 0.0  #: from when this was made to the last round's end

    threshold = gymnasium.spec(ENVIRONMENT).reward_threshold

    def __post_init__(self):
        self._begin = time.perf_counter()

    def add(self, batch: Sequence[Episodes]) -> Round:
        """Count a round's episodes, from which the agent has learned by now."""
        new = [total for episodes in batch for total in episodes.totals]
        self.rewards += new
        for reward in new:
            self.running_reward += AVERAGING * (reward - self.running_reward)
        self.env_steps += sum(int(episodes.lengths.sum()) for episodes in batch)
        self.rounds += 1
        self.seconds = time.perf_counter() - self._begin
        so_far = self.rounds, len(self.rewards), self.env_steps
        last_reward = sum(new) / len(new)
        return Round(*so_far, last_reward, self.running_reward, self.mean_reward)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the last 100 episodes, or of all if there are fewer."""
        last = self.rewards[-SOLVED_OVER:]
        return sum(last) / len(last) if last else 0.0

    @property
    def solved(self) -> bool:
        """Whether the last 100 episodes reached the threshold on average."""
        return len(self.rewards) >= SOLVED_OVER and self.mean_reward >= self.threshold


@dataclass(frozen=True)
class Training:
    """What a run returns."""

    score: Score  #: rewards and verdict
    rounds: list[Round]  #: what the agent reported after each round
    weights: dict[str, Tensor]  #: the trained policy's parameters, on the CPU

    def as_json(self) -> dict[str, Any]:
        """What the command line writes; times in seconds."""
        return {
            "solved": self.score.solved,
            "episodes": len(self.score.rewards),
            "mean_reward": self.score.mean_reward,
            **asdict(self.score),
        }


def run_agent(engine: OneProcess | Workers, config: ReinforceConfig) -> Training:
    """The agent's role: make the observers, then train until it is solved."""
    agent = SteadyAgent(config, engine) if engine.replaces else Agent(config)
    agent_rref = engine.reference(agent)
    observer_rrefs = [
        engine.remote(f"observer{i}", Observer, i, config)
        for i in range(config.num_observers)
    ]
    score, rounds = Score(), []
    while not score.solved and len(score.rewards) < config.max_episodes:
        batch = agent.run_episode(agent_rref, observer_rrefs)
        agent.finish_episode(batch)
        rounds.append(score.add(batch))
        engine.report("agent", rounds[-1])
    return Training(score, rounds, agent.weights())


def check(config: ReinforceConfig) -> None:
    """A ValueError if this machine has no memory for the workers."""
    checks.workers(config, "num_observers", others=1)


def run(
    config: ReinforceConfig, engine: Workers | None = None, **options: Any
) -> Training:
    """Train on workers: an agent and its observers, each in a process of its own.

    The options are those of :func:`~.launch.launch`. Raises what :func:`check` does,
    and a WorkerError if a worker failed.
    """
    check(config)
    engine = engine or TorchRPC()
    # One thread each: on a policy so small two would only wait for each other.
    roles = {"agent": Role(run_agent, (engine, config))}
    observer = Role(serve, replaceable=True)
    roles |= {f"observer{i}": observer for i in range(config.num_observers)}
    # An observer needs one for its episode, one to be answered; more slow small calls.
    options.setdefault("rpc_threads", 2)
    options.setdefault("polling", config.conversation != "local-policy")
    return engine.launch(roles, **options)["agent"]


def run_locally(
    config: ReinforceConfig, on_report: Callable[[str, Round], None] | None = None
) -> Training:
    """The same agent and observers in this process, without RPC.

    It computes with one thread, as each worker does, or the bits would be others.
    """
    with set_torch_threads(1):
        return run_agent(OneProcess(on_report), config)
