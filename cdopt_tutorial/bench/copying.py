"""The learning rate of each recurrent model, on the copying problem and on words."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

from cdopt_tutorial.bench.rows import Measured, Progress, Row, rows
from cdopt_tutorial.dissolving import memory
from cdopt_tutorial.dissolving.memory import MODELS, Job, Run, train
from cdopt_tutorial.engines import share

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = (101, 102, 103, 104, 105)  # not those of the chapter, which reports other runs
CONFIGS = {"copying": memory.MemoryConfig(), "next word": memory.next_word_config()}
SMOKE_TASKS = {
    "copying": memory.CopyingMemory(num_copies=2, delay=3),
    "next word": memory.NextWord(text_len=1_000),
}
SMOKE = {"steps": 25, "hidden": 8, "batch_size": 4}
FIGURES = ("loss", "recall", "weight", "mapped", "seconds")  # of a run, in the JSON


def measure(progress: Progress, smoke: bool = False) -> Measured:
    """Train each model at each learning rate from each seed."""
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

        each = [(job, config) for job in jobs]
        runs = share(train, each, on_done=tell, deadline=3600)
        chosen[name] = {model: best_lr(runs, model) for model in MODELS}
        measured += _losses(name, runs) + _times(name, runs, config.steps)
        for run in runs:
            found = {figure: getattr(run, figure) for figure in FIGURES}
            values.append({"task": name, **asdict(run.job), **found})
    progress(f"chosen: {chosen}")
    return measured, {"chosen": chosen, "values": values}


def best_lr(runs: Sequence[Run], model: str) -> float:
    """The learning rate with the lowest mean final loss; not if a run is not finite."""
    means = _means(runs, model)
    return min(means, key=means.__getitem__)


def _means(runs: Sequence[Run], model: str) -> dict[float, float]:
    """Mean final loss of each learning rate; ``inf`` if one run is not finite."""
    losses: dict[float, list[float]] = {}
    for run in runs:
        if run.job.model == model:
            loss = run.loss if math.isfinite(run.loss) else math.inf
            losses.setdefault(run.job.lr, []).append(loss)
    return {lr: statistics.fmean(several) for lr, several in losses.items()}


def _losses(name: str, runs: Sequence[Run]) -> list[Row]:
    """Mean final loss of each model and learning rate, over that of its best one."""
    found = []
    for model in MODELS:
        means, best = _means(runs, model), best_lr(runs, model)
        names = {lr: f"{name}, {model}, lr {lr:g}: loss" for lr in means}
        for lr, mean in means.items():
            ratio = mean / means[best]
            found.append(Row(names[lr], mean, "nats", names[best], ratio))
    return found


def _times(name: str, runs: Sequence[Run], steps: int) -> list[Row]:
    """Median time of a step of each model, over that of the free one."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        of = seconds.setdefault(f"{name}, {run.job.model}", {"step": []})
        of["step"].append(1e3 * run.seconds / steps)
    return rows(seconds, {"step": "ms"}, f"{name}, free")
