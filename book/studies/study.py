"""A study compares kinds of training: how one run of a kind is trained and reported."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Study:
    """The kinds to compare, and how long each is trained."""

    kinds: Sequence[str]
    #: makes a run of a kind, lr, seed and device, which has three methods: ``step(lr)``
    #: trains on the next batch, ``look()`` returns the losses of both halves of the
    #: held-out text in nats, and ``distance()`` ‖C‖ of what could be constrained.
    learner: Callable[[str, float, int, str], Any]
    steps: int  #: of a whole run
    every: int  #: steps between two evaluations on the held-out text
    patience: int  #: steps without an improvement after which a run stops

    def converge(
        self,
        kind: str,
        lr: float,
        decay: str,
        warm_up: int,
        seed: int,
        steps: int,
        device: str = "cpu",
        until: int | None = None,
    ) -> dict[str, Any]:
        """Train a kind for ``steps``, or until it has stopped improving.

        The rate rises over ``warm_up`` steps, and then stays ("none") or falls to 0 at
        the last step ("cosine"). The first half of the held-out text decides when to
        stop and which weights are the best. ``until`` cuts the run off.

        Returns the losses of both halves ("tuning", "test", in nats) at the best of the
        "steps", ‖C‖ there ("distance"), the "last" step, "step_seconds", and the
        "curve": (tuning, test, step) of each evaluation.
        """
        learner = self.learner(kind, lr, seed, device)
        curve, best, seconds = [], (math.inf, math.inf, 0, 0.0), 0.0
        for step in range(1, (until or steps) + 1):
            begin = time.perf_counter()
            learner.step(lr * factor(step - 1, steps, decay, warm_up))
            seconds += time.perf_counter() - begin
            if step % self.every == 0:
                losses = *learner.look(), step
                curve.append(losses)
                if losses[0] < best[0]:
                    best = *losses, learner.distance()
                elif step - best[2] >= self.patience or not math.isfinite(losses[0]):
                    break
        names = "tuning", "test", "steps", "distance"
        of_best = dict(zip(names, best, strict=True))
        return {**of_best, "last": step, "step_seconds": seconds / step, "curve": curve}


def factor(step: int, steps: int, decay: str, warm_up: int) -> float:
    """The factor on the learning rate at a step, counted from 0."""
    falling = (1 + math.cos(math.pi * step / steps)) / 2 if decay == "cosine" else 1
    return falling * min(1.0, (step + 1) / warm_up) if warm_up else falling
