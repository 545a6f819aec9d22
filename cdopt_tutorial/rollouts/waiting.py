"""Environments whose steps wait, as for a robot or a game server."""

import time
from functools import cached_property

from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.random import Generator
from numpy.typing import NDArray

WAITS = ("fixed", "heavy")
SHAPE = 1.5  # of the heavy waits' Pareto distribution, whose variance is infinite


class Waiting(VectorWrapper):
    """Each step takes ``step_ms`` milliseconds longer, and leaves the core to others.

    Heavy waits are drawn anew at each step, with the same mean as the fixed ones.
    """

    def __init__(self, env: VectorEnv, step_ms: float, waits: str):
        super().__init__(env)
        self._step_ms, self._waits = step_ms, waits

    @cached_property
    def _clock(self) -> Generator:
        """A stream of its own, so that waits draw nothing from the environments'."""
        (clock,) = self.np_random.spawn(1)
        return clock

    def step(self, actions: NDArray) -> tuple:
        """What the environments' own ``step`` returns."""
        time.sleep(wait_ms(self._step_ms, self._waits, self._clock) / 1000)
        return self.env.step(actions)


def wait_ms(step_ms: float, waits: str, clock: Generator) -> float:
    """Milliseconds that the next step waits."""
    if waits == "fixed":
        return step_ms
    least = step_ms * (SHAPE - 1) / SHAPE  # so that the mean is step_ms
    return least * (1 + clock.pareto(SHAPE))
