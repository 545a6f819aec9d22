"""The agent and its observers: what they own, and how they talk during a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor
from torch.futures import Future

from cdopt_tutorial.calls.device import device_for, pick_device, weights_of
from cdopt_tutorial.calls.rendezvous import Rendezvous
from cdopt_tutorial.checks import at_least, check, choices, learning_rate
from cdopt_tutorial.reinforce.learner import Actor, Episodes, Policy, policy_loss

ENVIRONMENT = "CartPole-v1"
# One environment where every step costs it a round trip; many where they share one.
DEFAULT_NUM_ENVS = {"per-step": 1, "packed": 1, "batched": 16, "local-policy": 32}


@dataclass(frozen=True)
class ReinforceConfig:
    """Settings of a run; a ValueError if one is out of range, or no such device."""

    #: how observers and agent talk: "per-step", "packed", "batched" or "local-policy".
    conversation: str = "local-policy"
    num_observers: int = 2  #: observers, each on a worker of its own, at least 1
    #: environments per observer; by default 1, 1, 16 or 32, by the conversation.
    num_envs: int | None = None
    gamma: float = 0.99  #: discount factor of the rewards, above 0 and at most 1
    lr: float = 1e-2  #: learning rate of Adam, above 0
    seed: int = 1  #: of the initial policy, the environments and the choice of actions
    max_episodes: int = 10_000  #: episodes after which an unsolved run ends
    log_interval: int = 10  #: rounds, or updates, between two log lines
    #: of the agent's policy, and of the observers' with "local-policy": "auto", "cpu",
    #: "cuda" or "cuda:N"; they share the GPUs of "cuda". Messages and random streams
    #: stay on the CPU.
    device: str = "cpu"
    #: mean reward at which the environment's authors call it solved.
    threshold: ClassVar = gymnasium.spec(ENVIRONMENT).reward_threshold or float("inf")

    def __post_init__(self):
        choices(self, conversation=CONVERSATIONS)
        if self.num_envs is None:
            object.__setattr__(self, "num_envs", DEFAULT_NUM_ENVS[self.conversation])
        at_least(self, 1, "num_observers", "num_envs", "max_episodes", "log_interval")
        check(self, "seed", 0 <= self.seed < 2**64, "at least 0 and below 2**64")
        check(self, "gamma", 0 < self.gamma <= 1, "above 0 and at most 1")
        learning_rate(self)
        object.__setattr__(self, "device", pick_device(self.device))

    def seed_of(self, observer: int, purpose: str) -> int:
        """An observer's own seed for its "environments" or its "actions"."""
        stream = ("environments", "actions").index(purpose)
        sequence = np.random.SeedSequence([self.seed, observer, stream])
        return int(sequence.generate_state(1)[0])

    def make_environments(self) -> VectorEnv:
        """An observer's environments, which step together."""
        return gymnasium.make_vec(ENVIRONMENT, self.num_envs or 1, "vector_entry_point")

    def make_policy(self) -> Policy:
        """The policy for them, initialised from torch's random state."""
        return Policy()


class Agent:
    """Trains one policy on the episodes of observers, which call it concurrently."""

    def __init__(self, config: ReinforceConfig):
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            policy = config.make_policy()
        self.policy = policy.to(device_for(config.device, 0))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.lr)
        seeds = (config.seed_of(i, "actions") for i in range(config.num_observers))
        self._actors = [Actor(self.policy, seed) for seed in seeds]
        self._waiting = Rendezvous(self._select_together)

    def run_episode(self, agent_rref, observer_rrefs: Sequence) -> list[Episodes]:
        """Have every observer run its episodes, and wait for all of them."""
        self._waiting.expect(range(len(observer_rrefs)))
        calls = [rref.rpc_async() for rref in observer_rrefs]
        futures = [call.run_episode(agent_rref) for call in calls]
        for number, future in enumerate(futures):
            future.add_done_callback(partial(self._leave_if_failed, number))
        both = zip(self._actors, futures, strict=True)
        return [actor.episodes(*future.wait()) for actor, future in both]

    def finish_episode(
        self, batch: Sequence[Episodes], weighting: Tensor | None = None
    ) -> tuple[int, float]:
        """Learn from a round of episodes: one step of Adam on :func:`~.policy_loss`.

        Returns the ``lag`` and ``max_ratio`` of the ``Round``: 0 and 1, since the
        policy that played is the one that learns.
        """
        self.optimizer.zero_grad()
        policy_loss(self.policy, batch, self.config.gamma, weighting).backward()
        self.optimizer.step()
        return 0, 1.0

    def select_action(self, observer: int, states: NDArray) -> NDArray:
        """Choose actions (n,) in an observer's states (n, 4); called by it."""
        return self._actors[observer].select(states)

    def report_reward(self, observer: int, rewards: NDArray) -> None:
        """Record the rewards (n,) of an observer's last actions; called by it."""
        self._actors[observer].rewards.append(rewards)

    def report_and_select(
        self, observer: int, rewards: NDArray, states: NDArray
    ) -> NDArray:
        """Both in one call; the first of an episode has no rewards yet."""
        if len(rewards):
            self.report_reward(observer, rewards)
        return self.select_action(observer, states)

    def report_and_wait(
        self, observer: int, rewards: NDArray, states: NDArray
    ) -> Future[NDArray]:
        """The same, but the future completes once all observers are waiting."""
        if len(rewards):
            self.report_reward(observer, rewards)
        return self._waiting.enter(observer, states)

    def report_and_leave(self, observer: int, rewards: NDArray) -> None:
        """Record an observer's last rewards; the others no longer wait for it."""
        self.report_reward(observer, rewards)
        self._waiting.leave(observer)

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters, copied to the CPU, for observers that act on it."""
        return weights_of(self.policy)

    def report_steps(
        self, observer: int, states: NDArray, actions: NDArray, rewards: NDArray
    ) -> None:
        """Record a whole round's steps at once: (T, n, 4), (T, n) and (T, n)."""
        actor = self._actors[observer]
        steps = states, actions, rewards
        actor.states, actor.actions, actor.rewards = map(list, steps)

    def _leave_if_failed(self, observer: int, call: Future) -> None:
        """Keep no other observer waiting, or the error would come only at the end."""
        try:
            call.value()
        except Exception:
            self._waiting.leave(observer)

    def _select_together(self, waiting: dict[int, NDArray]) -> dict[int, NDArray]:
        """One forward pass for the states of several observers."""
        scores = self.policy.scores(np.concatenate(list(waiting.values())))
        parts = scores.split([len(states) for states in waiting.values()])
        return {
            observer: self._actors[observer].draw(states, part)
            for (observer, states), part in zip(waiting.items(), parts, strict=True)
        }


class Observer:
    """Runs episodes in its own environments when the agent asks for them."""

    def __init__(self, number: int, config: ReinforceConfig):
        self._talk = CONVERSATIONS[config.conversation](number, config)
        self._env = config.make_environments()
        seed = config.seed_of(number, "environments")
        self._env.np_random = np.random.default_rng(seed)

    def run_episode(self, agent_rref) -> tuple[NDArray, NDArray]:
        """:meth:`play_episodes` within a conversation; called by the agent."""
        self._talk.begin(agent_rref)
        ends = self.play_episodes()
        self._talk.end()
        return ends

    def play_episodes(self) -> tuple[NDArray, NDArray]:
        """Play an episode per environment: its length, and whether it was truncated.

        An environment whose episode has ended is still stepped, but nothing counts.
        """
        states, _ = self._env.reset()
        running = np.ones(self._env.num_envs, dtype=bool)
        truncated = np.zeros_like(running)
        lengths = np.zeros(running.shape, dtype=np.int64)
        while running.any():
            actions = self._talk.ask(states)
            states, rewards, fallen, late, _ = self._env.step(actions)
            self._talk.tell((rewards * running).astype(np.float32))
            lengths += running
            truncated |= running & late & ~fallen
            running &= ~(fallen | late)
        return lengths, truncated


class PerStep:
    """Two calls a step, as in the original: a state for an action, then the reward.

    An observer's side of a conversation; arrays take half as long as tensors.
    """

    def __init__(self, number: int, config: ReinforceConfig):
        self._number = number

    def begin(self, agent_rref) -> None:
        """Start a round of episodes, with a reference to the agent."""
        self._agent = agent_rref.rpc_sync()

    def ask(self, states: NDArray) -> NDArray:
        """Get actions (n,) int64 for states (n, 4) float32."""
        return self._agent.select_action(self._number, states)

    def tell(self, rewards: NDArray) -> None:
        """Hand over the rewards (n,) float32 of the last actions."""
        self._agent.report_reward(self._number, rewards)

    def end(self) -> None:
        """End the round."""


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
        self._agent.report_and_leave(self._number, self._rewards)


class Batched(Packed):
    """The same call, answered once all observers wait, by one forward pass."""

    def ask(self, states: NDArray) -> NDArray:
        return self._agent.report_and_wait(self._number, self._rewards, states)


class LocalPolicy(PerStep):
    """Two calls a round: the observer fetches the weights and returns its episodes."""

    def __init__(self, number: int, config: ReinforceConfig):
        super().__init__(number, config)
        # The agent is worker 0.
        device = device_for(config.device, self._number + 1)
        policy = config.make_policy().to(device)
        self.actor = Actor(policy, config.seed_of(number, "actions"))

    def begin(self, agent_rref) -> None:
        super().begin(agent_rref)
        self.actor.policy.load_state_dict(self._agent.weights())

    def ask(self, states: NDArray) -> NDArray:
        return self.actor.select(states)

    def tell(self, rewards: NDArray) -> None:
        self.actor.rewards.append(rewards)

    def end(self) -> None:
        self._agent.report_steps(self._number, *self.actor.take_steps())


CONVERSATIONS = {
    "per-step": PerStep, "packed": Packed,
    "batched": Batched, "local-policy": LocalPolicy,
}  # fmt: skip
