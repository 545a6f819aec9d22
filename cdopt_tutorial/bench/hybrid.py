"""A step of the hybrid in one process, with 1, 2 and 4 trainers, and bare."""

import statistics
from dataclasses import replace
from functools import partial

import torch
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial.bench import bare
from cdopt_tutorial.bench.rows import Measured, Progress, against, phases, sweep
from cdopt_tutorial.data.bags import digit_bags
from cdopt_tutorial.hybrid import HybridConfig, Job, Result, run, run_locally
from cdopt_tutorial.hybrid.model import SEMANTICS
from cdopt_tutorial.hybrid.traffic import expected_bytes, measured_bytes

STEPS, SMOKE_STEPS = 60, 12
WARM_UP = 5  # steps that do not count: buffers are made, DDP sorts its buckets
TURNS = 5
TRAINERS = (1, 2, 4)
BASELINE = "local"
PHASES = ("lookup", "dense forward", "backward", "optimizer")
UNITS = {"step": "s", "samples": "1/s"}
UNITS |= dict.fromkeys(("bytes", "bytes by arithmetic"), "B/step")
UNITS |= dict.fromkeys(PHASES, "s/step")


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants in turns; in a smoke run, one turn, with two trainers only."""
    timed = {
        name: partial(_local_figures if name == BASELINE else _figures, job)
        for name, job in variants(smoke, device).items()
    }
    steps = SMOKE_STEPS if smoke else STEPS
    config = HybridConfig(max_steps=steps)
    timed["bare"] = partial(_bare_figures, config, _program(config))
    measured = sweep(timed, 1 if smoke else TURNS, progress, UNITS, BASELINE)
    return against(measured, "exact, 2 trainers", "bare", "step")


def variants(smoke: bool = False, device: str = "cpu") -> dict[str, Job]:
    """What is timed, by name, with enough data for the steps to be of one pass."""
    steps = SMOKE_STEPS if smoke else STEPS
    config = HybridConfig(max_steps=steps, device=device)
    data = digit_bags()
    again = torch.arange(steps * config.batch_size) % len(data.train)
    local = Job(config, replace(data, train=data.train.select(again)))
    jobs = {BASELINE: local}
    for semantics in SEMANTICS:
        for number in (2,) if smoke else TRAINERS:
            own = replace(config, semantics=semantics, num_trainers=number)
            name = f"{semantics}, {number} trainer{'s' if number > 1 else ''}"
            jobs[name] = replace(local, config=own)
    return jobs


def _figures(job: Job, turn: int) -> dict[str, float]:
    each_phase = phases(run, job)
    found = _speed(run(job)) | each_phase
    if turn == 1:  # no turn sends more than another
        found["bytes"] = measured_bytes(job)
        found["bytes by arithmetic"] = expected_bytes(job.config, job.data)
    return found


def _program(config: HybridConfig) -> str:
    """The bare one, with as many tokens as the digits' bags have."""
    batch_size, data = config.batch_size, digit_bags()
    sizes = data.num_tokens, config.embedding, batch_size
    more = f"""TOKENS, WIDTH, BATCH_SIZE = {sizes}
TRAINED, EPOCHS = {config.max_steps * batch_size}, 1

def read_bags():  # what they are takes no time
    tokens = torch.randint(TOKENS, [TRAINED + 8, 1 + {data.train.lengths[0]}])
    return torch.cat((tokens[:, :1] % 8, tokens[:, 1:]), dim=1)
"""
    return bare.program("bare_hybrid", more)


def _bare_figures(config: HybridConfig, program: str, _: int) -> dict[str, float]:
    step = bare.step_seconds(program, "barrier", WARM_UP)
    return {"step": step, "samples": config.batch_size / step}


def _local_figures(job: Job, _: int) -> dict[str, float]:
    with set_torch_threads(1):  # two would only wait for each other: the model is small
        return _speed(run_locally(job))


def _speed(result: Result) -> dict[str, float]:
    steps = [statistics.median(t.step_seconds[WARM_UP:]) for t in result.trainers]
    slowest = max(steps)
    return {"step": slowest, "samples": result.config.batch_size / slowest}
