"""The learning rate of each kind of chapter 6's study, free weights and held ones."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

from cdopt_tutorial.bench.rates import Trial, best_lr, trial_rows
from cdopt_tutorial.bench.rows import Measured, Progress
from cdopt_tutorial.engines import share
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

    def tell(_: int, run: Run) -> None:
        found = f"perplexity {run.perplexity:.2f}, distance {run.distance:.2g}"
        progress(f"{run.kind}, lr {run.lr:g}, seed {run.seed}: {found}")

    runs = share(train, jobs, on_done=tell, deadline=3600)
    trials = trials_of(runs)
    chosen = {kind: best_lr(trials, kind) for kind in KINDS}
    progress(f"chosen: {chosen}")
    values = [asdict(run) | {"perplexity": run.perplexity} for run in runs]
    measured = trial_rows(trials, "held-out loss", steps, "free")
    return measured, {"chosen": chosen, "values": values}


def trials_of(runs: Sequence[Run]) -> list[Trial]:
    """Runs as those of their kinds."""
    return [Trial(run.kind, run.lr, run.held_out_loss, run.seconds) for run in runs]
