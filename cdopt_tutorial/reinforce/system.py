"""Chapter 1's system: train an agent with its observers until CartPole is solved."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial.calls import alone, reference, remote
from cdopt_tutorial.reinforce.agent import Agent, Observer, ReinforceConfig
from cdopt_tutorial.reinforce.learner import Episodes
from cdopt_tutorial.run import Role, launch, report, serve

SOLVED_OVER = 100  # episodes whose mean reward decides


@dataclass(frozen=True)
class Round:
    """What the agent reports after each round."""

    number: int  #: of rounds so far
    episodes: int  #: so far
    env_steps: int  #: so far
    last_reward: float  #: mean of the round's episodes
    mean_reward: float  #: of the last 100 episodes
    lag: int = 0  #: age, in rounds, of the oldest weights that played
    max_ratio: float = 1.0  #: the largest ratio of probabilities, before clipping


@dataclass
class Score:
    """How well the agent does, and whether its environment counts as solved."""

    #: total reward of every episode, in the order of the observers.
    rewards: list[float] = field(default_factory=list)
    env_steps: int = 0  #: steps taken in all environments
    rounds: int = 0  #: times that the agent has learned
    seconds: float = 0.0  #: from the creation of this object to the last round's end

    threshold = ReinforceConfig.threshold  # or that of the run's config

    def __post_init__(self):
        self._begin = time.perf_counter()

    def add(
        self, batch: Sequence[Episodes], lag: int = 0, max_ratio: float = 1.0
    ) -> Round:
        """Count a round's episodes, once the agent has learned from them."""
        new = [total for episodes in batch for total in episodes.totals]
        self.rewards += new
        self.env_steps += sum(int(episodes.lengths.sum()) for episodes in batch)
        self.rounds += 1
        self.seconds = time.perf_counter() - self._begin
        so_far = self.rounds, len(self.rewards), self.env_steps
        means = sum(new) / len(new), self.mean_reward
        return Round(*so_far, *means, lag, max_ratio)

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

    def figures(self) -> dict[str, Any]:
        """What the command writes; times in seconds."""
        return {
            "solved": self.score.solved,
            "episodes": len(self.score.rewards),
            "mean_reward": self.score.mean_reward,
            **asdict(self.score),
        }


def run_agent(config: ReinforceConfig) -> Training:
    """The agent's role: make the observers, then train until the task is solved."""
    agent = Agent(config)
    agent_rref = reference(agent)
    observer_rrefs = [
        remote(f"observer{i}", Observer, i, config) for i in range(config.num_observers)
    ]
    batches = (agent.run_episode(agent_rref, observer_rrefs) for _ in count())
    return learn(agent, batches)


def learn(agent: Agent, batches: Iterable[Sequence[Episodes]]) -> Training:
    """The loop of all runs: learn from batches of episodes until solved."""
    score, rounds = Score(), []
    score.threshold = agent.config.threshold
    for batch in batches:
        rounds.append(score.add(batch, *agent.finish_episode(batch)))
        report(rounds[-1])
        if score.solved or len(score.rewards) >= agent.config.max_episodes:
            break
    return Training(score, rounds, agent.weights())


def run(
    config: ReinforceConfig, role: Callable[..., Training] = run_agent, **options: Any
) -> Training:
    """Train on workers: an agent and its observers, each in a process of its own.

    ``role`` is the agent's, ``options`` are those of :func:`~.launch.launch`. Raises a
    WorkerError if a worker failed.
    """
    # One thread each: on so small a policy two would only wait for each other.
    roles = {"agent": Role(role, (config,))}
    roles |= {f"observer{i}": Role(serve) for i in range(config.num_observers)}
    # One for an observer's episode, one for its answers; more would slow small calls.
    options.setdefault("rpc_threads", 2)
    options.setdefault("polling", config.conversation != "local-policy")
    return launch(roles, **options)["agent"]


def run_locally(config: ReinforceConfig) -> Training:
    """The same agent and observers in this process, without RPC.

    It computes with one thread, as each worker does, so that the bits are the same.
    """
    with alone(), set_torch_threads(1):
        return run_agent(config)
