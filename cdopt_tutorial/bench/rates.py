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


def loss_rows(trials: Sequence[Trial], what: str) -> list[Row]:
    """Mean loss of each method and rate, over that of the method's best one."""
    found = []
    for method in dict.fromkeys(trial.method for trial in trials):
        losses, best = _losses(trials, method), best_lr(trials, method)
        names = {lr: f"{method}, lr {lr:g}: {what}" for lr in losses}
        least = statistics.fmean(losses[best])
        for lr, several in losses.items():
            mean, ends = statistics.fmean(several), (min(several), max(several))
            row = names[lr], mean, "nats", names[best], mean / least
            found.append(Row(*row, *ends))
    return found


def time_rows(trials: Sequence[Trial], steps: int, baseline: str) -> list[Row]:
    """Median time of a step of each method, over that of one of them."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for trial in trials:
        of = seconds.setdefault(trial.method, {"step": []})
        of["step"].append(1e3 * trial.seconds / steps)
    return rows(seconds, {"step": "ms"}, baseline)


def _losses(trials: Sequence[Trial], method: str) -> dict[float, list[float]]:
    """The losses at each rate; ``inf`` for one that is not finite."""
    losses: dict[float, list[float]] = {}
    for trial in trials:
        if trial.method == method:
            loss = trial.loss if math.isfinite(trial.loss) else math.inf
            losses.setdefault(trial.lr, []).append(loss)
    return losses
