"""Learning rates compared: losses of each method at each rate, and its best rate."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from cdopt_tutorial.bench.rows import Row, rows


class Trial(NamedTuple):
    """One run of a method."""

    method: str  #: whose rate is looked for
    lr: float  #: the rate that was tried
    loss: float  #: at the end
    seconds: float  #: that the run took


def best_lr(trials: Sequence[Trial], method: str) -> float:
    """The rate with the lowest mean loss; not if a run's is not finite."""
    losses = _losses(trials, method)
    return min(losses, key=lambda lr: statistics.fmean(losses[lr]))


def trial_rows(trials: Sequence[Trial], what: str, steps: int, base: str) -> list[Row]:
    """Mean loss of each method and rate, and median time of a step of each method.

    A loss is over that of the method's best rate, a time over that of one of them.
    """
    found, seconds = [], {}
    for method in dict.fromkeys(trial.method for trial in trials):
        by_rate = _losses(trials, method).items()
        named = {f"{method}, lr {lr:g}": {what: losses} for lr, losses in by_rate}
        best = f"{method}, lr {best_lr(trials, method):g}"
        found += rows(named, {what: "nats"}, best, statistics.fmean)
        times = [1e3 * t.seconds / steps for t in trials if t.method == method]
        seconds[method] = {"step": times}
    return found + rows(seconds, {"step": "ms"}, base)


def _losses(trials: Sequence[Trial], method: str) -> dict[float, list[float]]:
    """The losses at each rate; ``inf`` for one that is not finite."""
    losses: dict[float, list[float]] = {}
    for trial in trials:
        if trial.method == method:
            loss = trial.loss if math.isfinite(trial.loss) else math.inf
            losses.setdefault(trial.lr, []).append(loss)
    return losses
