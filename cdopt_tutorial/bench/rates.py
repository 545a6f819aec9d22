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
    means = _means(trials, method)
    return min(means, key=means.__getitem__)


def loss_rows(trials: Sequence[Trial], what: str) -> list[Row]:
    """Mean loss of each method and rate, over that of the method's best one."""
    found = []
    for method in dict.fromkeys(trial.method for trial in trials):
        means, best = _means(trials, method), best_lr(trials, method)
        names = {lr: f"{method}, lr {lr:g}: {what}" for lr in means}
        for lr, mean in means.items():
            ratio = mean / means[best]
            found.append(Row(names[lr], mean, "nats", names[best], ratio))
    return found


def time_rows(trials: Sequence[Trial], steps: int, baseline: str) -> list[Row]:
    """Median time of a step of each method, over that of one of them."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for trial in trials:
        of = seconds.setdefault(trial.method, {"step": []})
        of["step"].append(1e3 * trial.seconds / steps)
    return rows(seconds, {"step": "ms"}, baseline)


def _means(trials: Sequence[Trial], method: str) -> dict[float, float]:
    """Mean loss of each rate; ``inf`` if one run's is not finite."""
    losses: dict[float, list[float]] = {}
    for trial in trials:
        if trial.method == method:
            loss = trial.loss if math.isfinite(trial.loss) else math.inf
            losses.setdefault(trial.lr, []).append(loss)
    return {lr: statistics.fmean(several) for lr, several in losses.items()}
