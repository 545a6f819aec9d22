"""The learning rate of each recurrent model, on the copying problem and on words."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product

from cdopt_tutorial.bench.rates import Trial, best_lr, trial_rows
from cdopt_tutorial.bench.rows import Measured, Progress
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


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Train each model at each learning rate from each seed."""
    lrs, seeds = (LRS[:2], SEEDS[:1]) if smoke else (LRS, SEEDS)
    # Models take turns, so that a slow minute of the machine hits all.
    jobs = [Job(model, lr, seed) for seed, lr, model in product(seeds, lrs, MODELS)]
    measured, chosen, values = [], {}, []
    for name, config in CONFIGS.items():
        if smoke:
            config = replace(config, task=SMOKE_TASKS[name], **SMOKE)
        config = replace(config, device=device)

        def tell(_: int, run: Run, name: str = name) -> None:
            job, found = run.job, f"loss {run.loss:.4f}, recall {run.recall:.3f}"
            progress(f"{name}, {job.model}, lr {job.lr:g}, seed {job.seed}: {found}")

        each = [(job, config) for job in jobs]
        runs = share(train, each, on_done=tell, deadline=3600)
        trials = trials_of(name, runs)
        chosen[name] = {model: best_lr(trials, f"{name}, {model}") for model in MODELS}
        measured += trial_rows(trials, "loss", config.steps, f"{name}, free")
        for run in runs:
            found = {figure: getattr(run, figure) for figure in FIGURES}
            values.append({"task": name, **asdict(run.job), **found})
    progress(f"chosen: {chosen}")
    return measured, {"chosen": chosen, "values": values}


def trials_of(task: str, runs: Sequence[Run]) -> list[Trial]:
    """Runs on a task, as those of its models."""
    return [Trial(f"{task}, {r.job.model}", r.job.lr, r.loss, r.seconds) for r in runs]
