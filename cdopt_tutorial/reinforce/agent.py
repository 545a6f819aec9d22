"""The agent: it owns the policy, answers the observers, and learns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.futures import Future

from cdopt_tutorial.engines.remote import Handle
from cdopt_tutorial.reinforce.config import ReinforceConfig
from cdopt_tutorial.reinforce.learner import (
    STATE_SIZE,
    Actor,
    Episodes,
    Policy,
    policy_loss,
)
from cdopt_tutorial.reinforce.waiting import WaitingRoom


class _Steps(NamedTuple):
    """What one observer has done since its episodes began, in chunks of (t, n, ...)."""

    states: list[NDArray]
    actions: list[NDArray]
    rewards: list[NDArray]


class Agent:
    """Trains one policy on the episodes of many observers.

    Lives on the agent's worker. It commands the observers by their RRefs, and they
    call back; what they send is kept apart by the observer's number, so observers
    may call at the same time.

    Args:
        config: of the run.
    """

    def __init__(self, config: ReinforceConfig):
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.policy = Policy(config.hidden).to(config.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.lr)
        observers = range(config.num_observers)
        self._actors = [
            Actor(self.policy, config.seed_of(i, "actions")) for i in observers
        ]
        self._steps = [_Steps([], [], []) for _ in observers]
        self._waiting = WaitingRoom(self._select_together)

    def select_action(self, observer: int, states: NDArray) -> NDArray:
        """Actions (n,) for an observer's states (n, 4); called by the observer."""
        return self._note(observer, states, self._actors[observer].select(states))

    def report_reward(self, observer: int, rewards: NDArray) -> None:
        """Take the rewards (n,) of an observer's last actions; called by it."""
        self._steps[observer].rewards.append(rewards[None])

    def report_and_select(
        self, observer: int, rewards: NDArray | None, states: NDArray
    ) -> NDArray:
        """Both in one call; the first of an episode has no rewards yet."""
        if rewards is not None:
            self.report_reward(observer, rewards)
        return self.select_action(observer, states)

    def report_and_wait(
        self, observer: int, rewards: bytes, states: bytes
    ) -> Future[bytes]:
        """The same, answered when all observers wait; holds no thread meanwhile.

        Args:
            observer: number of the observer.
            rewards: (n,) float32, or nothing at the start of an episode.
            states: (n, 4) float32.

        Returns:
            A future of the actions, (n,) int64.
        """
        if rewards:
            self.report_reward(observer, np.frombuffer(rewards, dtype=np.float32))
        rows = np.frombuffer(states, dtype=np.float32).reshape(-1, STATE_SIZE)
        return self._waiting.enter(observer, rows)

    def report_and_leave(self, observer: int, rewards: NDArray) -> None:
        """The observer's last rewards; the others need not wait for it any more."""
        self.report_reward(observer, rewards)
        self._waiting.leave(observer)

    def handle(self) -> Handle:
        """A cheaper reference to this agent, for an observer that calls often."""
        return Handle.to(self)

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters on the CPU, for an observer that acts itself."""
        return {name: value.cpu() for name, value in self.policy.state_dict().items()}

    def report_steps(
        self, observer: int, states: NDArray, actions: NDArray, rewards: NDArray
    ) -> None:
        """Take a whole round's steps at once: (T, n, 4), (T, n) and (T, n)."""
        self._steps[observer] = _Steps([states], [actions], [rewards])

    def run_episode(self, agent_rref, observer_rrefs: Sequence) -> list[Episodes]:
        """Command every observer to run its episodes, and wait for all of them.

        Args:
            agent_rref: reference to this agent, for the observers to call back.
            observer_rrefs: references to the observers, in the order of their numbers.

        Returns:
            Each observer's episodes, in the same order.
        """
        self._waiting.expect(range(len(observer_rrefs)))
        futures = [rref.rpc_async().run_episode(agent_rref) for rref in observer_rrefs]
        return [self._collect(i, *future.wait()) for i, future in enumerate(futures)]

    def finish_episode(self, batch: Sequence[Episodes]) -> float:
        """Learn from a round of episodes: one step of Adam; returns the loss."""
        loss = policy_loss(self.policy, batch, self.config.gamma)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _note(self, observer: int, states: NDArray, actions: NDArray) -> NDArray:
        self._steps[observer].states.append(states[None])
        self._steps[observer].actions.append(actions[None])
        return actions

    def _collect(self, observer: int, *outcome: NDArray) -> Episodes:
        steps, self._steps[observer] = self._steps[observer], _Steps([], [], [])
        return Episodes(*map(torch.from_numpy, (*map(np.concatenate, steps), *outcome)))

    def _select_together(self, waiting: dict[int, NDArray]) -> dict[int, bytes]:
        """One forward pass for the states of several observers."""
        scores = self.policy.scores(np.concatenate(list(waiting.values())))
        parts = scores.split([len(states) for states in waiting.values()])
        answers = {}
        for (observer, states), part in zip(waiting.items(), parts, strict=True):
            actions = self._note(observer, states, self._actors[observer].draw(part))
            answers[observer] = actions.tobytes()
        return answers
