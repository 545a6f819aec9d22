"""The training loop, and the roles that run it: over RPC, or in one process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import psutil
import torch.distributed.rpc as rpc
from torch import Tensor

from cdopt_tutorial.engines import Role, launch, report, serve
from cdopt_tutorial.engines.remote import LocalRef
from cdopt_tutorial.reinforce.agent import Agent
from cdopt_tutorial.reinforce.config import ENVIRONMENT, ReinforceConfig
from cdopt_tutorial.reinforce.learner import Episodes
from cdopt_tutorial.reinforce.observer import Observer

SOLVED_OVER = 100  # episodes whose mean reward decides
# An observer needs one thread for its episode and one to be answered; with more, the
# small calls of "batched" take longer to be handed on.
RPC_THREADS = 2
AVERAGING = 0.05  # weight of the newest episode in the original's running reward


@dataclass(frozen=True)
class Round:
    """What the agent reports after each round.

    Attributes:
        number: of the round, from 1.
        episodes: episodes so far.
        env_steps: environment steps so far.
        seconds: since the training began.
        last_reward: mean reward of the round's episodes.
        running_reward: the original's running reward.
        mean_reward: of the last 100 episodes.
        loss: of the step that the agent took.
    """

    number: int
    episodes: int
    env_steps: int
    seconds: float
    last_reward: float
    running_reward: float
    mean_reward: float
    loss: float


@dataclass
class Score:
    """How well the agent does, and the verdict on whether the task is solved.

    Solved is what the environment's authors call solved: a mean reward of the last
    100 episodes at its threshold. The original's running reward is kept, too; every
    episode enters it once, whichever observer ran it.

    Attributes:
        rewards: total reward of every episode, in the order of the observers.
        running_reward: exponential average over the episodes, from 0.
        env_steps: steps taken in all environments.
        rounds: times that the agent has learned.
        seconds: since the training began.
    """

    rewards: list[float] = field(default_factory=list)
    running_reward: float = 0.0
    env_steps: int = 0
    rounds: int = 0
    seconds: float = 0.0

    threshold = gymnasium.spec(ENVIRONMENT).reward_threshold

    def add(self, batch: Sequence[Episodes], seconds: float) -> None:
        """Count one round's episodes, finished ``seconds`` after the start."""
        for reward in [total for episodes in batch for total in episodes.totals]:
            self.rewards.append(reward)
            self.running_reward += AVERAGING * (reward - self.running_reward)
        self.env_steps += sum(int(episodes.lengths.sum()) for episodes in batch)
        self.rounds += 1
        self.seconds = seconds

    @property
    def mean_reward(self) -> float:
        """Mean reward of the last 100 episodes, or of all if there are fewer."""
        last = self.rewards[-SOLVED_OVER:]
        return sum(last) / len(last) if last else 0.0

    @property
    def solved(self) -> bool:
        """Whether the last 100 episodes reached the threshold on average."""
        return len(self.rewards) >= SOLVED_OVER and self.mean_reward >= self.threshold

    def as_round(self, episodes: int, loss: float) -> Round:
        """The state after a round of so many episodes, to be reported."""
        return Round(
            number=self.rounds,
            episodes=len(self.rewards),
            env_steps=self.env_steps,
            seconds=self.seconds,
            last_reward=sum(self.rewards[-episodes:]) / episodes,
            running_reward=self.running_reward,
            mean_reward=self.mean_reward,
            loss=loss,
        )


@dataclass(frozen=True)
class Training:
    """What a run returns.

    Attributes:
        score: rewards and verdict.
        rounds: what the agent reported after each round.
        weights: the trained policy's parameters, on the CPU.
    """

    score: Score
    rounds: list[Round]
    weights: dict[str, Tensor]

    def as_json(self) -> dict[str, Any]:
        """What the command line writes; times in seconds."""
        score = self.score
        return {
            "solved": score.solved,
            "episodes": len(score.rewards),
            "env_steps": score.env_steps,
            "rounds": score.rounds,
            "seconds": score.seconds,
            "running_reward": score.running_reward,
            "mean_reward": score.mean_reward,
            "rewards": score.rewards,
        }


def run(config: ReinforceConfig, **options: Any) -> Training:
    """Train over RPC: an agent and its observers, each in a process of its own.

    Args:
        config: of the run.
        options: of :func:`~cdopt_tutorial.engines.launch.launch`, for instance
            ``on_report``, which gets a :class:`Round` after each round.

    Raises:
        WorkerError: a worker failed.
    """
    # The agent learns while the observers wait, so the cores are its own.
    roles = {"agent": Role(run_agent, (config,), num_threads=psutil.cpu_count())}
    roles |= {f"observer{i}": Role(serve) for i in range(config.num_observers)}
    options.setdefault("rpc_threads", RPC_THREADS)
    options.setdefault("polling", config.conversation != "local-policy")
    return launch(roles, **options)["agent"]


def run_locally(
    config: ReinforceConfig, on_report: Callable[[str, Round], None] | None = None
) -> Training:
    """The same agent and observers in this process, without RPC."""
    agent = Agent(config)
    observers = [LocalRef(Observer(i, config)) for i in range(config.num_observers)]
    tell = (
        (lambda record: on_report("agent", record))
        if on_report
        else (lambda record: None)
    )
    return train(agent, LocalRef(agent), observers, tell)


def run_agent(config: ReinforceConfig) -> Training:
    """The agent's role: make the observers on their workers, then train."""
    agent = Agent(config)
    observer_rrefs = [
        rpc.remote(f"observer{i}", Observer, args=(i, config))
        for i in range(config.num_observers)
    ]
    return train(agent, rpc.RRef(agent), observer_rrefs, report)


def train(
    agent: Agent, agent_rref, observer_rrefs: Sequence, tell: Callable[[Round], None]
) -> Training:
    """Rounds of episodes and learning, until solved or out of episodes.

    Args:
        agent: in this process.
        agent_rref: reference to it, for the observers.
        observer_rrefs: references to the observers.
        tell: called after each round.
    """
    score, rounds, begin = Score(), [], time.perf_counter()
    while not score.solved and len(score.rewards) < agent.config.max_episodes:
        batch = agent.run_episode(agent_rref, observer_rrefs)
        loss = agent.finish_episode(batch)
        score.add(batch, time.perf_counter() - begin)
        rounds.append(score.as_round(agent.config.episodes_per_round, loss))
        tell(rounds[-1])
    return Training(score, rounds, agent.weights())
