"""Does weight decay do what the constraint does? For chapters 4 and 6: 75 minutes.

Kinds of the two larger studies are trained again with AdamW, which decays every matrix
but constrained ones; "spared" are the same matrices of a free model. Rate and decay
move together on a grid until no cell around the best is better for the tuning seeds;
all else is as those studies tuned it.

The book's results are stored in cdopt_tutorial/decay.json.
"""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

import recurrent
import transformer
from climb import Cell, best, climb, setting
from runs import arguments, keep, write
from torch import Tensor, nn, optim
from torch.nn.utils import parametrize
from tuning import SEEDS, TUNING_SEEDS

from cdopt_tutorial.sharding.model import chosen_layers
from cdopt_tutorial.study import Study

STUDIES = {"parameter_server": recurrent.STUDY, "sharding": transformer.STUDY}
KINDS = "free", "orthogonal start", "Stiefel"
NAMES = [f"{chapter}/{kind}" for chapter in STUDIES for kind in KINDS]
SPARED = ", spared"
NAMES.append(f"sharding/orthogonal start{SPARED}")
RATES = [setting((place, 0))["lr"] for place in range(-12, 3)]  # 0.0001 to 50
FIRST = (0, -4), (0, -2), (0, 0)  # places on the grid of rates, and powers of 4
# All eight, since rate and decay act by their product.
BESIDE = [step for step in product((-1, 0, 1), (-1, 0, 1)) if any(step)]


def adamw(
    model: nn.Module, lr: float, weight_decay: float, spared: Collection[Tensor] = ()
) -> optim.Optimizer:
    """For a model, whose free matrices decay but for those spared, and nothing else."""
    constrained = filter(parametrize.is_parametrized, model.modules())
    fixed = {w for layer in constrained for w in layer.parametrizations.parameters()}
    fixed |= set(spared)
    decays = {w: w.dim() > 1 and w not in fixed for w in model.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [w for w in decays if decays[w]]},
        {"params": [w for w in decays if not decays[w]], "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, lr, weight_decay=weight_decay, foreach=False)


def one(name: str, weight_decay: float, **how: Any) -> dict[str, Any]:
    """A run of a chapter's study in which weights decay; see ``Study.converge``."""
    chapter, kind = name.removesuffix(SPARED).split("/")
    study = STUDIES[chapter]

    def learner(*of: Any) -> Any:
        run, decay = study.learner(*of), (how["lr"], weight_decay)
        if chapter == "sharding":
            attention = chosen_layers(run.model, run.config) if SPARED in name else ()
            spared = [layer.weight for layer in attention]
            run.trainer.optimizers = [adamw(run.model, *decay, spared)]
        else:
            run.optimizer = adamw(run.parts, *decay)
        return run

    steps = how.pop("steps") or study.steps
    return replace(study, learner=learner).converge(kind, steps=steps, **how)


def job(name: str, cell: Cell, seed: int) -> dict[str, Any]:
    """A run's arguments: a rate and a decay from a cell, the rest as it was tuned."""
    chapter, kind = name.removesuffix(SPARED).split("/")
    _, lr, decay, warm_up = next(c for c in Study(chapter).chosen if c[0] == kind)
    up, power = cell
    how = {"lr": RATES[RATES.index(lr) + up], "weight_decay": 4.0**power}
    return {"name": name, **how, "decay": decay, "warm_up": warm_up, "seed": seed}


def main(options: argparse.Namespace) -> None:
    """Tune each kind, and train it with the other seeds."""
    names, first, few, steps, beside = NAMES, FIRST, None, 0, BESIDE
    if options.smoke:
        names, first, few, steps, beside = NAMES[:1], FIRST[:1], 1, 2, ()
    kept: list[dict[str, Any]] = []

    def train(cells: Sequence[tuple[str, Cell]], seeds: Sequence[int]) -> list[dict]:
        same = {"steps": steps, "device": options.device}
        jobs = [job(*of, seed) | same for of, seed in product(cells, seeds)]
        runs = keep(options.out, one, jobs)
        for run in runs:
            del run["curve"], run["device"]
        kept.extend(runs)
        return runs

    def score(cells: Sequence[tuple[str, Cell]]) -> list[list[float]]:
        seeds = TUNING_SEEDS[:few]
        losses = (-run["tuning"] for run in train(cells, seeds))
        return [[*islice(losses, len(seeds))] for _ in cells]

    scores = climb(score, names, first, beside)
    train([(name, best(scores[name])) for name in names], SEEDS[:few])
    tuned = [run for run in kept if run["seed"] in TUNING_SEEDS]
    reported = [run for run in kept if run["seed"] in SEEDS]
    write(options.out, tuned=tuned, runs=reported)


if __name__ == "__main__":
    main(arguments(__doc__))
