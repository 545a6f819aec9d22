"""The learning rate of each kind of chapter 6's study, free weights and held ones."""

from dataclasses import asdict
from itertools import product

from cdopt_tutorial.bench.rates import Trial, try_rates
from cdopt_tutorial.bench.rows import Measured, Progress
from cdopt_tutorial.sharding.study import CONFIG, KINDS, Run, train

LRS = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
SEEDS = (101, 102, 103)  # not those of the chapter, which reports other runs


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Train each kind at each learning rate from each seed."""
    whole = LRS, SEEDS, CONFIG.max_steps
    lrs, seeds, steps = (LRS[:2], SEEDS[:1], 3) if smoke else whole
    # Kinds take turns, so that a slow minute of the machine hits all.
    each = product(seeds, lrs, KINDS)
    jobs = [(kind, lr, seed, steps, device) for seed, lr, kind in each]
    options = {"steps": steps, "progress": progress, "loss_name": "held-out loss"}
    runs, chosen, measured = try_rates(train, jobs, trial_of, **options)
    progress(f"chosen: {chosen}")
    values = [asdict(run) | {"perplexity": run.perplexity} for run in runs]
    return measured, {"chosen": chosen, "values": values}


def trial_of(run: Run) -> Trial:
    """A run as that of its kind."""
    return Trial(run.kind, run.lr, run.seed, run.held_out_loss, run.seconds)
