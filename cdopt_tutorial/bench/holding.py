"""The learning rate of each kind of chapter 6's study, free weights and held ones."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from cdopt_tutorial.bench.rows import Measured, Progress, Row, rows
from cdopt_tutorial.engines import share
from cdopt_tutorial.sharding.kinds import KINDS
from cdopt_tutorial.sharding.study import CONFIG, Run, train

LRS = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
SEEDS = (101, 102, 103)  # not those of the chapter, which reports other runs
SMOKE_STEPS = 3


def measure(progress: Progress, smoke: bool = False) -> Measured:
    """Train each kind at each learning rate from each seed."""
    lrs, seeds = (LRS[:2], SEEDS[:1]) if smoke else (LRS, SEEDS)
    steps = SMOKE_STEPS if smoke else CONFIG.max_steps
    # Kinds take turns, so that a slow minute of the machine hits all.
    jobs = [(kind, lr, seed, steps) for seed in seeds for lr in lrs for kind in KINDS]

    def tell(_: int, run: Run) -> None:
        found = f"perplexity {run.perplexity:.2f}, distance {run.distance:.2g}"
        progress(f"{run.kind}, lr {run.lr:g}, seed {run.seed}: {found}")

    runs = share(train, jobs, on_done=tell, deadline=3600)
    chosen = {kind: best_lr(runs, kind) for kind in KINDS}
    progress(f"chosen: {chosen}")
    values = [asdict(run) | {"perplexity": run.perplexity} for run in runs]
    return _losses(runs) + _times(runs, steps), {"chosen": chosen, "values": values}


def best_lr(runs: Sequence[Run], kind: str) -> float:
    """The rate with the lowest mean held-out loss; not if a run's is not finite."""
    means = _means(runs, kind)
    return min(means, key=means.__getitem__)


def _means(runs: Sequence[Run], kind: str) -> dict[float, float]:
    """Mean held-out loss of each rate; ``inf`` if one run's is not finite."""
    losses: dict[float, list[float]] = {}
    for run in runs:
        if run.kind == kind:
            known = math.isfinite(run.held_out_loss)
            loss = run.held_out_loss if known else math.inf
            losses.setdefault(run.lr, []).append(loss)
    return {lr: statistics.fmean(several) for lr, several in losses.items()}


def _losses(runs: Sequence[Run]) -> list[Row]:
    """Mean held-out loss of each kind and rate, over that of its best one."""
    found = []
    for kind in KINDS:
        means, best = _means(runs, kind), best_lr(runs, kind)
        names = {lr: f"{kind}, lr {lr:g}: held-out loss" for lr in means}
        for lr, mean in means.items():
            ratio = mean / means[best]
            found.append(Row(names[lr], mean, "nats", names[best], ratio))
    return found


def _times(runs: Sequence[Run], steps: int) -> list[Row]:
    """Median time of a run of each kind by its steps, over that of the free one."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        of = seconds.setdefault(run.kind, {"step": []})
        of["step"].append(1e3 * run.seconds / steps)
    return rows(seconds, {"step": "ms"}, "free")
