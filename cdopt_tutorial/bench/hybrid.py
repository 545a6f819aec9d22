"""A step of the hybrid in one process, and with 1, 2 and 4 trainers."""

import statistics
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.data.bags import digit_bags
from cdopt_tutorial.hybrid import HybridConfig, Job, Result, run, run_locally
from cdopt_tutorial.hybrid.model import SEMANTICS
from cdopt_tutorial.training import measured_bytes

WARM_UP = 5  # steps that do not count: buffers are made, DDP sorts its buckets
BASELINE = "local"
UNITS = {"step": "s", "bytes": "B/step"}


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants in turns; in a smoke run, one turn, with two trainers only."""
    steps, turns, trainers = (12, 1, [2]) if smoke else (60, 5, [1, 2, 4])
    config, data = HybridConfig(max_steps=steps, device=device), digit_bags()
    # So many images that the steps are of one pass.
    again = torch.arange(steps * config.batch_size) % len(data.train)
    local = Job(config, replace(data, train=data.train.select(again)))
    variants = {BASELINE: partial(_local_figures, local)}
    for semantics, number in product(SEMANTICS, trainers):
        own = replace(config, semantics=semantics, num_trainers=number)
        name = f"{semantics}, {number} trainer{'s' if number > 1 else ''}"
        variants[name] = partial(_figures, replace(local, config=own))
    return sweep(variants, turns, progress, UNITS, BASELINE)


def _figures(job: Job, turn: int) -> dict[str, float]:
    found = {"step": step_seconds(run(job))}
    if turn == 1:  # no turn sends more than another
        steps = job.config.max_steps
        found["bytes"] = measured_bytes(run, job, steps - 1)
    return found


def _local_figures(job: Job, _: int) -> dict[str, float]:
    with set_torch_threads(1):  # two would only wait for each other: the model is small
        return {"step": step_seconds(run_locally(job))}


def step_seconds(result: Result) -> float:
    """The slowest trainer's median seconds of a step, after the warm-up."""
    return max(statistics.median(t.step_seconds[WARM_UP:]) for t in result.trainers)
