"""The learning rate of each recurrent model, on the copying problem and on words."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from cdopt_tutorial.bench.rows import Row, rows
from cdopt_tutorial.dissolving.memory import (
    Job,
    MemoryConfig,
    Run,
    next_word_config,
    run_jobs,
)
from cdopt_tutorial.dissolving.recurrent import MODELS
from cdopt_tutorial.dissolving.tasks import CopyingMemory, NextWord

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = (101, 102, 103, 104, 105)  # not those of the chapter, which reports other runs
CONFIGS = {"copying": MemoryConfig(), "next word": next_word_config()}
SMOKE = {"steps": 25, "hidden": 8, "batch_size": 4}
SMOKE_TASKS = {
    "copying": CopyingMemory(num_copies=2, delay=3),
    "next word": NextWord(text_len=1_000),
}


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
    lrs, seeds = (LRS[:2], SEEDS[:1]) if smoke else (LRS, SEEDS)
    # Models take turns, so that a slow minute of the machine hits all.
    jobs = [Job(model, lr, seed) for seed in seeds for lr in lrs for model in MODELS]
    measured, chosen, values = [], {}, []
    for name, config in CONFIGS.items():
        if smoke:
            config = replace(config, task=SMOKE_TASKS[name], **SMOKE)

        def tell(_: int, run: Run, name: str = name) -> None:
            job, found = run.job, f"loss {run.loss:.4f}, recall {run.recall:.3f}"
            progress(f"{name}, {job.model}, lr {job.lr:g}, seed {job.seed}: {found}")

        runs = run_jobs(jobs, config, on_done=tell, deadline=3600)
        chosen[name] = {model: best_lr(runs, model) for model in MODELS}
        measured += _losses(name, runs, chosen[name]) + _times(name, runs, config.steps)
        values += [_values(name, run) for run in runs]
    progress(f"chosen: {chosen}")
    return measured, {"chosen": chosen, "values": values}


def best_lr(runs: Sequence[Run], model: str) -> float:
    """The learning rate with the lowest mean final loss of a model.

    A run that is not finite rules its learning rate out.
    """
    means = {lr: mean for (name, lr), mean in _means(runs).items() if name == model}
    return min(means, key=means.__getitem__)


def _means(runs: Sequence[Run]) -> dict[tuple[str, float], float]:
    """Mean final loss over the seeds; ``inf`` if one of the runs is not finite."""
    losses: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        loss = run.loss if math.isfinite(run.loss) else math.inf
        losses.setdefault((run.job.model, run.job.lr), []).append(loss)
    return {key: statistics.fmean(several) for key, several in losses.items()}


def _losses(name: str, runs: Sequence[Run], best: Mapping[str, float]) -> list[Row]:
    """Mean final loss of each model and learning rate, over that of its best one."""
    means = _means(runs)
    return [
        Row(
            f"{name}, {model}, lr {lr:g}: loss",
            mean,
            "nats",
            f"{name}, {model}, lr {best[model]:g}: loss",
            mean / means[model, best[model]],
        )
        for (model, lr), mean in means.items()
    ]


def _times(name: str, runs: Sequence[Run], steps: int) -> list[Row]:
    """Median time of a step of each model, over that of the free one."""
    seconds: dict[str, dict[str, list[float]]] = {
        f"{name}, {model}": {"step": []} for model in MODELS
    }
    for run in runs:
        seconds[f"{name}, {run.job.model}"]["step"].append(1e3 * run.seconds / steps)
    return rows(seconds, {"step": "ms"}, f"{name}, free")


def _values(name: str, run: Run) -> dict:
    """One run, as it is written to the JSON file."""
    figures = ("loss", "recall", "weight", "mapped", "seconds")
    found = {figure: getattr(run, figure) for figure in figures}
    return {"task": name, **asdict(run.job), **found}
