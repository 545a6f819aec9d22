"""The learning rate of each recurrent model, on the copying problem and on words."""

from dataclasses import asdict, replace
from itertools import product

from cdopt_tutorial.bench.rates import Trial, try_rates
from cdopt_tutorial.bench.rows import Measured, Progress
from cdopt_tutorial.dissolving import memory
from cdopt_tutorial.dissolving.memory import MODELS, Job, Run, train

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = (101, 102, 103, 104, 105)  # not those of the chapter, which reports other runs
CONFIGS = {"copying": memory.MemoryConfig(), "next word": memory.next_word_config()}
SMOKE_TASKS = {
    "copying": memory.CopyingMemory(num_copies=2, delay=3),
    "next word": memory.NextWord(text_len=1_000),
}
SMOKE = {"steps": 25, "hidden": 8, "batch_size": 4}
FIGURES = ("loss", "recall", "mapped", "seconds")  # of a run, in the JSON


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
        each = [(job, config) for job in jobs]
        options = {"steps": config.steps, "progress": progress, "prefix": f"{name}, "}
        runs, chosen[name], found = try_rates(train, each, trial_of, **options)
        measured += found
        for run in runs:
            figures = {figure: getattr(run, figure) for figure in FIGURES}
            values.append({"task": name, **asdict(run.job), **figures})
    progress(f"chosen: {chosen}")
    return measured, {"chosen": chosen, "values": values}


def trial_of(run: Run) -> Trial:
    """A run as that of its model."""
    job = run.job
    return Trial(job.model, job.lr, job.seed, run.loss, run.seconds)
