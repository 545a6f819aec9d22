"""The learning rate of each recurrent model, on the copying problem and on words."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cdopt_tutorial.bench.rows import Row
from cdopt_tutorial.data import CopyingMemory
from cdopt_tutorial.dissolving.memory import (
    Job,
    MemoryConfig,
    Run,
    next_word_config,
    run_jobs,
)
from cdopt_tutorial.dissolving.recurrent import MODELS

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = (101, 102, 103, 104, 105)  # not those of the chapter, which reports other runs
CONFIGS = {"copying": MemoryConfig(), "next word": next_word_config()}
SMOKE = {"steps": 25, "hidden": 8, "batch_size": 4}
BASELINE = "free"


def measure(
    progress: Callable[[str], None], smoke: bool = False
) -> tuple[list[Row], dict]:
    """Train each model at each learning rate from each seed.

    Args:
        progress: called with a line when a run is done.
        smoke: one seed, two learning rates, 25 steps at a width of 8.

    Returns:
        The rows, each compared with the model's best learning rate, and with the free
        model for the time of a step; the chosen learning rates; every single run.
    """
    measured, chosen, values = [], {}, []
    for name, config in CONFIGS.items():
        config = _small(config) if smoke else config
        jobs = _jobs(smoke)
        runs = run_jobs(jobs, config, on_done=_teller(name, progress), deadline=3600)
        chosen[name] = {model: best_lr(runs, model) for model in MODELS}
        measured += _rows(name, runs, chosen[name]) + _times(name, runs, config.steps)
        values += [_values(name, one) for one in runs]
    progress(f"chosen: {chosen}")
    return measured, {"chosen": chosen, "values": values}


def best_lr(runs: Sequence[Run], model: str) -> float:
    """The learning rate with the lowest mean final loss of a model.

    A run that is not finite rules its learning rate out.
    """
    means = {lr: mean for (name, lr), mean in _means(runs).items() if name == model}
    return min(means, key=means.__getitem__)


def _small(config: MemoryConfig) -> MemoryConfig:
    small = replace(config, **SMOKE)
    if isinstance(config.task, CopyingMemory):
        return replace(small, task=CopyingMemory(num_copies=2, delay=3))
    return replace(small, task=replace(config.task, text_len=1_000))


def _jobs(smoke: bool) -> list[Job]:
    lrs, seeds = (LRS[:2], SEEDS[:1]) if smoke else (LRS, SEEDS)
    # Models take turns, so that a slow minute of the machine hits all.
    return [Job(model, lr, seed) for seed in seeds for lr in lrs for model in MODELS]


def _teller(name: str, progress: Callable[[str], None]) -> Callable[[int, Run], None]:
    def tell(_: int, run: Run) -> None:
        job = run.job
        progress(
            f"{name}, {job.model}, lr {job.lr:g}, seed {job.seed}: "
            f"loss {run.loss:.4f}, recall {run.recall:.3f}"
        )

    return tell


def _rows(name: str, runs: Sequence[Run], chosen: Mapping[str, float]) -> list[Row]:
    """Mean final loss of each model and learning rate, over that of its best one."""
    means = _means(runs)
    return [
        Row(
            f"{name}, {model}, lr {lr:g}: loss",
            mean,
            "nats",
            f"{name}, {model}, lr {chosen[model]:g}: loss",
            mean / means[model, chosen[model]],
        )
        for (model, lr), mean in means.items()
    ]


def _means(runs: Sequence[Run]) -> dict[tuple[str, float], float]:
    """Mean final loss over the seeds; ``inf`` if one of the runs is not finite."""
    losses: dict[tuple[str, float], list[float]] = {}
    for one in runs:
        loss = one.loss if math.isfinite(one.loss) else math.inf
        losses.setdefault((one.job.model, one.job.lr), []).append(loss)
    return {key: statistics.fmean(several) for key, several in losses.items()}


def _times(name: str, runs: Sequence[Run], steps: int) -> list[Row]:
    """Median time of a step of each model, over that of the free one."""
    medians = {
        model: 1e3
        * statistics.median(one.seconds for one in runs if one.job.model == model)
        / steps
        for model in MODELS
    }
    return [
        Row(
            f"{name}, {model}: step",
            median,
            "ms",
            f"{name}, {BASELINE}: step",
            median / medians[BASELINE],
        )
        for model, median in medians.items()
    ]


def _values(name: str, run: Run) -> dict:
    """One run, as it is written to the JSON file."""
    return {
        "task": name,
        "model": run.job.model,
        "lr": run.job.lr,
        "seed": run.job.seed,
        "loss": run.loss,
        "recall": run.recall,
        "weight": run.weight,
        "mapped": run.mapped,
        "seconds": run.seconds,
    }
