"""The observer: it owns environments, and asks what to do in them."""

import gymnasium
import numpy as np
from numpy.typing import NDArray

from cdopt_tutorial.reinforce.config import ENVIRONMENT, ReinforceConfig
from cdopt_tutorial.reinforce.conversations import CONVERSATIONS
from cdopt_tutorial.reinforce.learner import Actor, Policy


class Observer:
    """Runs episodes in its environments when the agent tells it to.

    The agent makes it on an observer's worker and keeps an RRef to it.

    Args:
        number: number of the observer, from 0.
        config: of the run.
    """

    def __init__(self, number: int, config: ReinforceConfig):
        actor = Actor(Policy(config.hidden), config.seed_of(number, "actions"))
        self._talk = CONVERSATIONS[config.conversation](number, actor)
        self._env = gymnasium.make_vec(
            ENVIRONMENT,
            num_envs=config.num_envs,
            vectorization_mode="vector_entry_point",
        )
        self._seed = config.seed_of(number, "environments")

    def run_episode(self, agent_rref) -> tuple[NDArray, NDArray]:
        """One episode in every environment; called by the agent.

        An environment whose episode is over waits for the others: it is stepped
        along, but nothing that happens in it counts.

        Args:
            agent_rref: reference to the agent.

        Returns:
            Lengths (n,) int64 of the episodes, and (n,) bool: cut by the time limit.
        """
        self._talk.begin(agent_rref)
        states, _ = self._env.reset(seed=self._seed)
        self._seed = None  # later episodes go on with the same stream of chance
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
