"""The studies of chapters 4 and 6: each kind is tuned by itself, then trained.

A rate is best if its neighbours on a grid are worse, by the mean loss of the tuning
seeds on the first half of the held-out text; the other schedules are tried at that
rate. The report has other seeds, and the other half.
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path
from statistics import fmean

from cdopt_tutorial.bench.rows import Measured, Progress, rows
from cdopt_tutorial.bench.runs import keep
from cdopt_tutorial.data import perplexity
from cdopt_tutorial.study import Study

RATES, FIRST = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2), (2e-3, 5e-3, 1e-2)
SCHEDULES = ("cosine", 100), ("none", 100), ("cosine", 0)  # decay, and warm-up
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)

Setting = tuple[str, float, str, int]  # kind, lr, decay, warm_up
Train = Callable[[Sequence[Setting], Sequence[int]], dict[Setting, list[dict]]]


def measure(
    study: Study, progress: Progress, smoke: bool, device: str, path: Path | None
) -> Measured:
    """Tune each kind's rate, decay and warm-up, and train it with each seed."""
    steps, kinds = study.steps, study.kinds
    if smoke:
        steps, kinds = study.every, ("free", "Stiefel")
    runs: list[dict] = []

    def train(settings: Sequence[Setting], seeds: Sequence[int]) -> dict:
        names = "kind", "lr", "decay", "warm_up"
        jobs = [
            dict(zip(names, setting, strict=True))
            | {"seed": seed, "steps": steps, "device": device}
            for setting, seed in product(settings, seeds)
        ]
        found = keep(path, study.converge, jobs, progress)
        runs.extend(found)
        each = iter(found)
        return {setting: list(islice(each, len(seeds))) for setting in settings}

    chosen = tune(train, kinds, TUNING_SEEDS[: 1 if smoke else None])
    found = train(chosen, SEEDS[: 1 if smoke else None])
    values = {
        kind: {
            "perplexity": [perplexity(run["test"]) for run in of],
            "steps": [run["steps"] for run in of],
            "step": [run["step_seconds"] for run in of],
        }
        for (kind, *_), of in found.items()
    }
    tuned = [run for run in runs if run["seed"] in TUNING_SEEDS]
    tuned = [{k: v for k, v in run.items() if k != "curve"} for run in tuned]
    return rows(values, {"perplexity": "1", "steps": "1", "step": "s"}), {
        "chosen": chosen,
        "tuned": tuned,
        "runs": [run for run in runs if run["seed"] in SEEDS],
    }


def tune(train: Train, kinds: Sequence[str], seeds: Sequence[int]) -> list[Setting]:
    """Each kind's setting with the least loss of the tuning text."""
    losses: dict[Setting, float] = {}

    def try_all(settings: Sequence[Setting]) -> None:
        for setting, found in train(settings, seeds).items():
            each = [run["tuning"] for run in found]
            losses[setting] = fmean(each) if all(map(math.isfinite, each)) else math.inf

    def best(kind: str) -> Setting:
        return min((of for of in losses if of[0] == kind), key=losses.get)

    new = [(kind, lr, *SCHEDULES[0]) for kind, lr in product(kinds, FIRST)]
    while new:  # until both neighbours of each best rate have been tried
        try_all(new)
        new = []
        for kind in kinds:
            at = RATES.index(best(kind)[1])
            beside = RATES[max(0, at - 1) : at + 2]
            new += [(kind, lr, *SCHEDULES[0]) for lr in beside]
        new = [setting for setting in new if setting not in losses]
    try_all([(*best(kind)[:2], *how) for kind, how in product(kinds, SCHEDULES[1:])])
    return [best(kind) for kind in kinds]
