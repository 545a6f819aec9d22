"""Kinds of training compared, each tuned by itself: the studies of chapters 4 and 6.

A rate is best if its neighbours on a grid are worse, by the mean loss of the tuning
seeds on the first half of the held-out text; the other schedules are tried at that
rate. The report has other seeds, and the other half.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, product
from statistics import fmean

from climb import BESIDE, Cell, climb, setting
from runs import keep, write
from study import Study

FIRST = (-8, 0), (-7, 0), (-6, 0)  # rates of 0.002, 0.005 and 0.01, see `climb.setting`
RATES = BESIDE[:2]  # the next ones; no scale is tuned here
SCHEDULES = ("cosine", 100), ("none", 100), ("cosine", 0)  # decay, and warm-up
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
NAMES = "kind", "lr", "decay", "warm_up"

Setting = tuple[str, float, str, int]  # of these names
Train = Callable[[Sequence[Setting], Sequence[int]], dict[Setting, list[dict]]]


def compare(study: Study, options: argparse.Namespace) -> None:
    """Tune each kind's rate, decay and warm-up, train it with each seed, and write."""
    few, beside, runs = None, RATES, []
    if options.smoke:
        few, beside = 1, ()
        study = replace(study, kinds=["Stiefel"], steps=2, every=2)
    same = {"steps": study.steps, "device": options.device}

    def train(settings: Sequence[Setting], seeds: Sequence[int]) -> dict:
        jobs = [
            dict(zip(NAMES, how, strict=True), seed=seed, **same)
            for how, seed in product(settings, seeds)
        ]
        found = keep(options.out, study.converge, jobs)
        runs.extend(found)
        each = iter(found)
        return {how: list(islice(each, len(seeds))) for how in settings}

    chosen = tune(train, study.kinds, TUNING_SEEDS[:few], beside)
    train(chosen, SEEDS[:few])
    for run in runs:
        del run["device"]
    tuned = [run for run in runs if run["seed"] in TUNING_SEEDS]
    for run in tuned:
        del run["curve"]
    reported = [run for run in runs if run["seed"] in SEEDS]
    write(options.out, chosen=chosen, tuned=tuned, runs=reported)


def tune(
    train: Train,
    kinds: Sequence[str],
    seeds: Sequence[int],
    beside: Sequence[Cell] = RATES,
) -> list[Setting]:
    """Each kind's setting with the least loss of the tuning text."""
    losses: dict[Setting, float] = {}

    def try_all(settings: Sequence[Setting]) -> None:
        for how, found in train(settings, seeds).items():
            each = [run["tuning"] for run in found]
            losses[how] = fmean(each) if all(map(math.isfinite, each)) else math.inf

    def score(cells: Sequence[tuple[str, Cell]]) -> list[list[float]]:
        new = [(kind, setting(cell)["lr"], *SCHEDULES[0]) for kind, cell in cells]
        try_all(new)
        return [[-losses[each]] for each in new]

    def best(kind: str) -> Setting:
        return min((of for of in losses if of[0] == kind), key=losses.get)

    climb(score, kinds, FIRST, beside)
    try_all([(*best(kind)[:2], *how) for kind, how in product(kinds, SCHEDULES[1:])])
    return [best(kind) for kind in kinds]
