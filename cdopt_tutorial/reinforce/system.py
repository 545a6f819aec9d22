"""Chapter 1's system: an agent and its observers, which learn CartPole together."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.futures import Future
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial import checks
from cdopt_tutorial.engines import Role, serve
from cdopt_tutorial.engines.one_process import OneProcess
from cdopt_tutorial.engines.seam.device import device_for, pick_device
from cdopt_tutorial.engines.seam.rendezvous import Rendezvous
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.learner import (
    STATE_SIZE,
    Actor,
    Episodes,
    Policy,
    policy_loss,
)

ENVIRONMENT = "CartPole-v1"
SOLVED_OVER = 100  # episodes whose mean reward decides
AVERAGING = 0.05  # weight of the newest episode in the original's running reward
# Bytes that an episode in one environment takes: no pole falls in fewer than 8 steps,
# and of each the state, the action and the reward are noted.
EPISODE = 8 * (STATE_SIZE * 4 + 8 + 4)

# One environment where every step is a round trip, many where one serves them all.
DEFAULT_NUM_ENVS = {"per-step": 1, "packed": 1, "batched": 16, "local-policy": 32}


@dataclass(frozen=True)
class ReinforceConfig:
    """Settings of a run; a ValueError if one is out of its range, or no such device."""

    #: how observers and agent converse: "per-step", "packed", "batched" or
    #: "local-policy".
    conversation: str = "local-policy"
    num_observers: int = 2  #: observers, each on a worker of its own, at least 1
    #: environments of each observer; None takes the conversation's default: 1, 1, 16
    #: and 32 in this order.
    num_envs: int | None = None
    gamma: float = 0.99  #: discount factor of the rewards, above 0 and at most 1
    lr: float = 1e-2  #: learning rate of Adam, above 0
    hidden: int = 128  #: width of the policy's hidden layer
    seed: int = 1  #: of the policy's start, the environments and the choice of actions
    max_episodes: int = 10_000  #: episodes after which an unsolved run ends
    #: rounds, of one episode in every environment, between two log lines.
    log_interval: int = 10
    #: of the agent's policy, and of the observers' with "local-policy", as
    #: :func:`~.device.pick_device` takes it; they share out the
    #: GPUs of "cuda". What travels, and all chance, is on the CPU.
    device: str = "cpu"

    def __post_init__(self):
        known = f"one of {', '.join(CONVERSATIONS)}"
        checks.check(self, "conversation", self.conversation in CONVERSATIONS, known)
        if self.num_envs is None:
            object.__setattr__(self, "num_envs", DEFAULT_NUM_ENVS[self.conversation])
        checks.at_least(self, 1, "num_observers", "num_envs", "hidden")
        checks.at_least(self, 1, "max_episodes", "log_interval")
        seeds = "at least 0 and below 2**64"
        checks.check(self, "seed", 0 <= self.seed < 2**64, seeds)
        checks.check(self, "gamma", 0 < self.gamma <= 1, "above 0 and at most 1")
        checks.learning_rate(self)
        object.__setattr__(self, "device", pick_device(self.device))

    def seed_of(self, observer: int, purpose: str) -> int:
        """A seed of an observer's own for its "environments" or its "actions"."""
        stream = ("environments", "actions").index(purpose)
        sequence = np.random.SeedSequence([self.seed, observer, stream])
        return int(sequence.generate_state(1)[0])


class Agent:
    """Trains one policy on the episodes of observers, who call back, all at once."""

    def __init__(self, config: ReinforceConfig):
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            policy = Policy(config.hidden)
        self.policy = policy.to(device_for(config.device, 0))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.lr)
        seeds = (config.seed_of(i, "actions") for i in range(config.num_observers))
        self._actors = [Actor(self.policy, seed) for seed in seeds]
        self._waiting = Rendezvous(self._select_together)

    def run_episode(self, agent_rref, observer_rrefs: Sequence) -> list[Episodes]:
        """Command every observer to run its episodes, and wait for all of them."""
        self._waiting.expect(range(len(observer_rrefs)))
        futures = [rref.rpc_async().run_episode(agent_rref) for rref in observer_rrefs]
        return [self._episodes(i, *future.wait()) for i, future in enumerate(futures)]

    def finish_episode(self, batch: Sequence[Episodes]) -> None:
        """Learn from a round of episodes: one step of Adam."""
        self.optimizer.zero_grad()
        policy_loss(self.policy, batch, self.config.gamma).backward()
        self.optimizer.step()

    def select_action(self, observer: int, states: NDArray) -> NDArray:
        """Actions (n,) for an observer's states (n, 4); called by the observer."""
        return self._actors[observer].select(states)

    def report_reward(self, observer: int, rewards: NDArray) -> None:
        """Take the rewards (n,) of an observer's last actions; called by it."""
        self._actors[observer].rewards.append(rewards)

    def report_and_select(
        self, observer: int, rewards: NDArray, states: NDArray
    ) -> NDArray:
        """Both in one call; the first of an episode has no rewards yet."""
        if len(rewards):
            self.report_reward(observer, rewards)
        return self.select_action(observer, states)

    def report_and_wait(
        self, observer: int, rewards: bytes, states: bytes
    ) -> Future[bytes]:
        """The same as bytes, answered by a future once all observers wait."""
        if rewards:
            self.report_reward(observer, np.frombuffer(rewards, dtype=np.float32))
        rows = np.frombuffer(states, dtype=np.float32).reshape(-1, STATE_SIZE)
        return self._waiting.enter(observer, rows)

    def report_and_leave(self, observer: int, rewards: NDArray) -> None:
        """The observer's last rewards; the others need not wait for it any more."""
        self.report_reward(observer, rewards)
        self._waiting.leave(observer)

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters on the CPU, for an observer that acts itself."""
        return {name: value.cpu() for name, value in self.policy.state_dict().items()}

    def report_steps(
        self, observer: int, states: NDArray, actions: NDArray, rewards: NDArray
    ) -> None:
        """Take a whole round's steps at once: (T, n, 4), (T, n) and (T, n)."""
        actor = self._actors[observer]
        actor.states, actor.actions, actor.rewards = states, actions, rewards

    def _select_together(self, waiting: dict[int, NDArray]) -> dict[int, bytes]:
        """One forward pass for the states of several observers."""
        scores = self.policy.scores(np.concatenate(list(waiting.values())))
        parts = scores.split([len(states) for states in waiting.values()])
        return {
            observer: self._actors[observer].draw(states, part).tobytes()
            for (observer, states), part in zip(waiting.items(), parts, strict=True)
        }

    def _episodes(self, observer: int, *ends: NDArray) -> Episodes:
        steps = self._actors[observer].take_steps()
        return Episodes(*map(torch.from_numpy, (*steps, *ends)))


class Observer:
    """Runs episodes in its environments when the agent tells it to."""

    def __init__(self, number: int, config: ReinforceConfig):
        self._talk = CONVERSATIONS[config.conversation](number, config)
        self._env = gymnasium.make_vec(
            ENVIRONMENT, config.num_envs, vectorization_mode="vector_entry_point"
        )
        seed = config.seed_of(number, "environments")
        self._env.np_random = np.random.default_rng(seed)

    def run_episode(self, agent_rref) -> tuple[NDArray, NDArray]:
        """One episode in every environment: its length, and whether time cut it.

        Where it is over, the environment is stepped along, but nothing counts.
        """
        self._talk.begin(agent_rref)
        states, _ = self._env.reset()
        running = np.ones(self._env.num_envs, dtype=bool)
        truncated = np.zeros_like(running)
        lengths = np.zeros(running.shape, dtype=np.int64)
        while running.any():
            actions = self._talk.ask(states)
            states, rewards, fallen, late, _ = self._env.step(actions)
            self._talk.tell(np.float32(rewards * running))
            lengths += running
            truncated |= running & late & ~fallen
            running &= ~(fallen | late)
        self._talk.end()
        return lengths, truncated


class PerStep:
    """Two calls a step, as in the original: the state for an action, then the reward.

    The observer's side of a conversation, in arrays: tensors take twice the time.
    """

    def __init__(self, number: int, config: ReinforceConfig):
        self._number = number

    def begin(self, agent_rref) -> None:
        """A round of episodes starts; the reference is to the agent."""
        self._agent = agent_rref.rpc_sync()

    def ask(self, states: NDArray) -> NDArray:
        """Actions (n,) int64 for states (n, 4) float32."""
        return self._agent.select_action(self._number, states)

    def tell(self, rewards: NDArray) -> None:
        """Hand over the rewards (n,) float32 of the last actions."""
        self._agent.report_reward(self._number, rewards)

    def end(self) -> None:
        """All episodes are over."""


class Packed(PerStep):
    """One call a step: the last reward travels with the next state."""

    def begin(self, agent_rref) -> None:
        super().begin(agent_rref)
        self._rewards = np.empty(0, dtype=np.float32)  # none yet

    def ask(self, states: NDArray) -> NDArray:
        return self._agent.report_and_select(self._number, self._rewards, states)

    def tell(self, rewards: NDArray) -> None:
        self._rewards = rewards

    def end(self) -> None:
        self._agent.report_reward(self._number, self._rewards)


class Batched(Packed):
    """The same call, answered once all observers wait: one forward pass for all."""

    def ask(self, states: NDArray) -> NDArray:
        # Bytes, since arrays take longer to pickle and unpickle.
        told = self._rewards.tobytes(), states.tobytes()
        actions = self._agent.report_and_wait(self._number, *told)
        return np.frombuffer(actions, dtype=np.int64)

    def end(self) -> None:
        self._agent.report_and_leave(self._number, self._rewards)


class LocalPolicy(PerStep):
    """Two calls a round: the weights come to the observer, its episodes go back."""

    def __init__(self, number: int, config: ReinforceConfig):
        super().__init__(number, config)
        # The agent is worker 0.
        policy = Policy(config.hidden).to(device_for(config.device, number + 1))
        self._actor = Actor(policy, config.seed_of(number, "actions"))

    def begin(self, agent_rref) -> None:
        super().begin(agent_rref)
        self._actor.policy.load_state_dict(self._agent.weights())

    def ask(self, states: NDArray) -> NDArray:
        return self._actor.select(states)

    def tell(self, rewards: NDArray) -> None:
        self._actor.rewards.append(rewards)

    def end(self) -> None:
        self._agent.report_steps(self._number, *self._actor.take_steps())


CONVERSATIONS = {
    "per-step": PerStep, "packed": Packed,
    "batched": Batched, "local-policy": LocalPolicy,
}  # fmt: skip


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
    agent = Agent(config)
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
    """A ValueError if this machine has no memory for the workers, or their episodes."""
    checks.workers(config, "num_observers", others=1)
    number = config.num_observers * config.num_envs
    checks.in_memory(f"a round in {number} environments", number * EPISODE)


def run(
    config: ReinforceConfig, engine: Workers | None = None, **options: Any
) -> Training:
    """Train on workers: an agent and its observers, each in a process of its own.

    The options are those of :func:`~.launch.launch`. A ValueError
    where :func:`check` refuses the config, a WorkerError if a worker failed.
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
    if engine.replaces:
        from cdopt_tutorial.reinforce import steady  # imports this module

        options.setdefault("attach", partial(steady.attach, engine))
    return engine.launch(roles, **options)["agent"]


def run_locally(
    config: ReinforceConfig, on_report: Callable[[str, Round], None] | None = None
) -> Training:
    """The same agent and observers in this process, without RPC.

    It computes with one thread, as each worker does, or the bits would be others.
    """
    with set_torch_threads(1):
        return run_agent(OneProcess(on_report), config)
