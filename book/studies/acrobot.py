"""Chapter 8's study on Acrobot-v1, vectorized; gymnasium only loops over it."""

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.acrobot import AcrobotEnv
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from cdopt_tutorial.reinforce.learner import Policy
from cdopt_tutorial.rollouts import RolloutsConfig


class Acrobots(VectorEnv):
    """Two-link pendulums that must swing up; they go on after an episode's end.

    Equations, constants and rewards are those of gymnasium's ``AcrobotEnv``.
    """

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self._one = AcrobotEnv()
        self._most_steps = gymnasium.spec("Acrobot-v1").max_episode_steps

    def reset(self) -> tuple[NDArray, dict[str, Any]]:
        """First states (n, 6): all hang down."""
        self._steps = 0
        start = self.np_random.uniform(-0.1, 0.1, (4, self.num_envs))
        self._state = start.astype(np.float32).astype(np.float64)  # as gymnasium's
        return self._seen(), {}

    def step(self, actions: NDArray) -> tuple:
        """States (n, 6), rewards (n,), which swung up (n,), whose time is over (n,)."""
        one, self._steps = self._one, self._steps + 1
        torques = np.array(one.AVAIL_TORQUE)[actions]
        moved = self._integrate(np.vstack((self._state, torques)), one.dt)
        angles = (moved[:2] + np.pi) % (2 * np.pi) - np.pi
        most = np.array([[one.MAX_VEL_1], [one.MAX_VEL_2]])
        self._state = np.vstack((angles, moved[2:4].clip(-most, most)))
        up = -np.cos(angles[0]) - np.cos(angles[0] + angles[1]) > 1
        late = np.full(self.num_envs, self._steps >= self._most_steps)
        return self._seen(), np.where(up, 0.0, -1.0), up, late, {}

    def _integrate(self, state: NDArray, dt: float) -> NDArray:
        """A Runge-Kutta step of fourth order."""
        slopes: list[NDArray] = []
        for ahead in (0, dt / 2, dt / 2, dt):
            at = state + ahead * slopes[-1] if slopes else state
            slopes.append(np.vstack(np.broadcast_arrays(*self._one._dsdt(at))))
        first, second, third, last = slopes
        return state + dt / 6 * (first + 2 * second + 2 * third + last)

    def _seen(self) -> NDArray:
        cosines, sines = np.cos(self._state[:2]), np.sin(self._state[:2])
        seen = (cosines[0], sines[0], cosines[1], sines[1], *self._state[2:])
        return np.stack(seen, axis=1).astype(np.float32)


@dataclass(frozen=True)
class AcrobotConfig(RolloutsConfig):
    """Settings of a run on Acrobot."""

    threshold = gymnasium.spec("Acrobot-v1").reward_threshold

    def make_environments(self) -> Acrobots:
        return Acrobots(self.num_envs)

    def make_policy(self) -> Policy:
        return Policy(state_size=6, num_actions=3)
