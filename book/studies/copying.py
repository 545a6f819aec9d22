"""The learning rates of chapter 3's recurrent models, tried on both tasks.

The book's results are stored in cdopt_tutorial/dissolving/copying.json, and the best
rates are those of cdopt_tutorial/dissolving/memory.py.
"""

import argparse
import math
from dataclasses import replace
from itertools import product
from statistics import fmean

from runs import arguments, write

from cdopt_tutorial.dissolving.memory import (
    MODELS,
    NEXT_WORD,
    CopyingMemory,
    MemoryConfig,
    NextWord,
    run,
)

RATES = 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1
SEEDS = 101, 102, 103, 104, 105  # not those of the chapter, which reports other runs
CONFIGS = {"copying": MemoryConfig(), "next word": NEXT_WORD}
SMALL = {"copying": CopyingMemory(num_copies=2, delay=3)}
SMALL |= {"next word": NextWord(text_len=1_000)}


def main(options: argparse.Namespace) -> None:
    """Train each model on each task at each rate, with each seed."""
    tuned: list[list] = []
    for lr, task in product(RATES[: 2 if options.smoke else None], CONFIGS):
        print(f"{task}, lr {lr:g}", flush=True)
        config = replace(CONFIGS[task], lr=lr, seeds=SEEDS, device=options.device)
        if options.smoke:
            small = {"task": SMALL[task], "seeds": SEEDS[:1], "steps": 25}
            config = replace(config, hidden=8, batch_size=4, **small)
        for model, runs in run(config).items():
            tuned.append([task, model, lr, *(each.losses[-1] for each in runs)])
    chosen = [
        min((row for row in tuned if row[:2] == [task, model]), key=mean)[:3]
        for task, model in product(CONFIGS, MODELS)
    ]
    write(options.out, chosen=chosen, tuned=tuned)


def mean(row: list) -> float:
    """The mean final loss in nats of a tuned rate, infinite if one is not finite."""
    _, _, _, *losses = row
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


if __name__ == "__main__":
    main(arguments(__doc__))
