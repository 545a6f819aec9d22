"""Learning rates compared: each method is trained at each rate, from each seed."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cdopt_tutorial.bench.rows import Progress, Row, rows
from cdopt_tutorial.engines import share


class Trial(NamedTuple):
    """What is compared of a run."""

    method: str  #: whose rate is looked for
    lr: float  #: the rate that was tried
    seed: int  #: of the run
    loss: float  #: at the end, in nats
    seconds: float  #: that the run took


def try_rates(
    train: Callable,
    jobs: Sequence[tuple],
    trial_of: Callable[[Any], Trial],
    steps: int,
    progress: Progress,
    loss_name: str = "loss",
    prefix: str = "",
) -> tuple[list[Any], dict[str, float], list[Row]]:
    """Train in worker processes; the runs, each method's best rate, and the rows.

    The best rate has the lowest mean loss, and none that is not finite. A loss is over
    that of the method's best rate, the time of a step over that of the method "free".
    """

    def tell(_: int, run: Any) -> None:
        method, lr, seed, loss, _ = trial_of(run)
        progress(f"{prefix}{method}, lr {lr:g}, seed {seed}: {loss_name} {loss:.4f}")

    runs = share(train, jobs, on_done=tell, deadline=3600)
    losses: dict[str, dict[float, list[float]]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    for method, lr, _, loss, seconds in map(trial_of, runs):
        loss = loss if math.isfinite(loss) else math.inf
        losses.setdefault(method, {}).setdefault(lr, []).append(loss)
        of = times.setdefault(prefix + method, {"step": []})
        of["step"].append(1e3 * seconds / steps)
    best, measured = {}, []
    for method, by_rate in losses.items():
        means = {lr: statistics.fmean(found) for lr, found in by_rate.items()}
        best[method] = min(means, key=means.__getitem__)
        name = f"{prefix}{method}, lr "
        values = {f"{name}{lr:g}": {loss_name: found} for lr, found in by_rate.items()}
        base = f"{name}{best[method]:g}"
        measured += rows(values, {loss_name: "nats"}, base, statistics.fmean)
    return runs, best, measured + rows(times, {"step": "ms"}, f"{prefix}free")
