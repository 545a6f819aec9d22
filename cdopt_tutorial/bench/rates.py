"""Learning rates compared: each method is trained at each rate, with each seed."""

import math
import statistics
from dataclasses import replace
from itertools import product

from cdopt_tutorial.bench.rows import Measured, Progress, rows
from cdopt_tutorial.dissolving import memory

# Seeds are not those of the chapter, which reports other runs.
COPYING_LRS, COPYING_SEEDS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), range(101, 106)
TASKS = {"copying": memory.MemoryConfig(), "next word": memory.next_word_config()}
SMOKE_TASKS = {
    "copying": memory.CopyingMemory(num_copies=2, delay=3),
    "next word": memory.NextWord(text_len=1_000),
}
SMOKE = {"steps": 25, "hidden": 8, "batch_size": 4, "seeds": COPYING_SEEDS[:1]}


def copying(progress: Progress, smoke: bool, device: str) -> Measured:
    """Try learning rates for chapter 3's recurrent models, on two tasks.

    The mean losses of each method at each rate, over that of its best rate, which comes
    first. A loss that is not finite counts as infinite.
    """
    lrs, values = COPYING_LRS[: 2 if smoke else None], {}
    for lr, (task, config) in product(lrs, TASKS.items()):
        progress(f"{task}, lr {lr:g}")
        own = {"lrs": dict.fromkeys(memory.MODELS, lr), "seeds": COPYING_SEEDS}
        own |= {"task": SMOKE_TASKS[task], **SMOKE} if smoke else {}
        for model, runs in memory.run(replace(config, device=device, **own)).items():
            method, losses = f"{task}, {model}", [run.losses[-1] for run in runs]
            losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
            values.setdefault(method, {})[f"{method}, lr {lr:g}"] = {"loss": losses}
    measured = []
    for of in values.values():
        best = min(of, key=lambda name: statistics.fmean(of[name]["loss"]))
        measured += rows({best: of[best], **of}, {"loss": "nats"}, statistics.fmean)
    return measured, {"values": values}
