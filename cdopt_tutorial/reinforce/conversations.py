"""Four ways for an observer to converse with its agent; all else is the same.

With each round of episodes an observer *begins* a conversation. It *asks* for
actions, *tells* the rewards, and *ends* it. What then crosses the wire, and how
often, is all that differs.

States, actions and rewards are NumPy arrays, as the environments have them. An array
travels inside its message; a tensor takes a channel of its own, and a small message
with a tensor in it takes about twice as long as one without.
"""

import numpy as np
from numpy.typing import NDArray

from cdopt_tutorial.reinforce.learner import Actor


class PerStep:
    """Two calls a step, as in the original: the state for an action, then the reward.

    Lives on the observer's worker and calls the agent.

    Args:
        observer: the observer's number, by which the agent knows it.
        actor: what would choose this observer's actions, for the conversation that
            does so on the spot.
    """

    def __init__(self, observer: int, actor: Actor):
        self._observer, self._actor = observer, actor

    def begin(self, agent_rref) -> None:
        """Episodes start; the agent is at the other end of ``agent_rref``."""
        self._agent_rref = agent_rref

    def ask(self, states: NDArray) -> NDArray:
        """Actions (n,) int64 for states (n, 4) float32."""
        return self._agent_rref.rpc_sync().select_action(self._observer, states)

    def tell(self, rewards: NDArray) -> None:
        """Hand over the rewards (n,) float32 of the last actions."""
        self._agent_rref.rpc_sync().report_reward(self._observer, rewards)

    def end(self) -> None:
        """All episodes are over."""


class Packed(PerStep):
    """One call a step: the last reward travels with the next state."""

    def begin(self, agent_rref) -> None:
        super().begin(agent_rref)
        self._rewards = None

    def ask(self, states: NDArray) -> NDArray:
        agent = self._agent_rref.rpc_sync()
        return agent.report_and_select(self._observer, self._rewards, states)

    def tell(self, rewards: NDArray) -> None:
        self._rewards = rewards

    def end(self) -> None:
        self._agent_rref.rpc_sync().report_reward(self._observer, self._rewards)


class Batched(Packed):
    """The same call, answered once all observers wait: one forward pass for all.

    What surrounds the numbers is left out as well: the call goes by a handle, so no
    RRef travels with it, and arrays go as bytes, which need no unpickling.
    """

    def begin(self, agent_rref) -> None:
        super().begin(agent_rref)
        self._agent = agent_rref.rpc_sync().handle()
        self._rewards = np.empty(0, dtype=np.float32)  # none yet

    def ask(self, states: NDArray) -> NDArray:
        rewards = self._rewards.tobytes()
        actions = self._agent.call(
            "report_and_wait", self._observer, rewards, states.tobytes()
        )
        return np.frombuffer(actions, dtype=np.int64)

    def end(self) -> None:
        self._agent.call("report_and_leave", self._observer, self._rewards)


class LocalPolicy(PerStep):
    """Two calls a round: the weights come to the observer, its episodes go back."""

    def begin(self, agent_rref) -> None:
        super().begin(agent_rref)
        self._actor.policy.load_state_dict(agent_rref.rpc_sync().weights())
        self._states, self._actions, self._rewards = [], [], []

    def ask(self, states: NDArray) -> NDArray:
        actions = self._actor.select(states)
        self._states.append(states)
        self._actions.append(actions)
        return actions

    def tell(self, rewards: NDArray) -> None:
        self._rewards.append(rewards)

    def end(self) -> None:
        steps = map(np.stack, (self._states, self._actions, self._rewards))
        self._agent_rref.rpc_sync().report_steps(self._observer, *steps)


CONVERSATIONS = {
    "per-step": PerStep,
    "packed": Packed,
    "batched": Batched,
    "local-policy": LocalPolicy,
}
