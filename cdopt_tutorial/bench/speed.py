"""The speed of the systems, on every engine.

Each bench calls ``progress`` with a line before each measurement, and returns the rows
and the rest of the JSON; with ``smoke`` it takes seconds.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice, product
from types import ModuleType
from typing import Any

from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial import data, hybrid, reinforce
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.engines import Role, serve
from cdopt_tutorial.engines.on_ray import OnRay
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.agent import DEFAULT_NUM_ENVS
from cdopt_tutorial.training import measured_bytes

WARM_UP = 5  # steps that do not count: they make buffers, and DDP sorts its buckets
ALONE = "one process"  # with one thread
UNITS = {
    "environment steps": "1/s", "time to solve": "s", "step": "s", "bytes": "B/step",
    "start and end": "s", "call": "s",
}  # fmt: skip
ENGINES: Mapping[str, Callable[[], Workers | None]] = {
    "torch RPC": TorchRPC,
    "torch RPC, cut": partial(TorchRPC, "cut"),
    "Ray": OnRay,
    ALONE: lambda: None,
}


# For each system: its module, the config of all runs, what a smoke run changes in it,
# what each variant changes, the baseline first, and what makes a job of a config.
SYSTEMS = {
    "reinforce": (
        reinforce, reinforce.ReinforceConfig(), {"max_episodes": 4},
        {
            name: {"conversation": name, "num_envs": num_envs}
            for name, num_envs in DEFAULT_NUM_ENVS.items()
        },
        lambda config: config,
    ),
    "rnn": (
        rnn,
        rnn.RNNConfig(
            embedding=200, hidden=200, num_layers=2, dropout=0.2, optimizer="sgd",
            lr=0.1, clip=0.25, max_steps=WARM_UP + 12,
        ),
        {"embedding": 32, "hidden": 32, "max_steps": WARM_UP + 2},
        {
            ALONE: {},
            "logits": {"cut": "logits"},
            "loss": {"cut": "loss"},
            "loss, 2 trainers": {"cut": "loss", "num_trainers": 2},
        },
        lambda config: rnn.Job(config, data.load_corpus()),
    ),
    "hybrid": (
        hybrid, hybrid.HybridConfig(max_steps=60), {"max_steps": 12},
        {ALONE: {}} | {
            f"{how}, trainers: {k}": {"semantics": how, "num_trainers": k}
            for k, how in product((1, 2, 4), ("exact", "original"))
        },
        hybrid.Job,
    ),
}  # fmt: skip


def systems(name: str, progress: Progress, smoke: bool, device: str) -> Measured:
    """Measure a system's variants, or in a smoke run the first three."""
    system, config, smaller, variants, job = SYSTEMS[name]
    runs = {}
    for variant, settings in islice(variants.items(), 3 if smoke else None):
        own = {**settings, **(smaller if smoke else {}), "device": device}
        engine = None if variant == ALONE else TorchRPC()
        runs[variant] = partial(figures, system, job(replace(config, **own)), engine)
    return sweep([runs], UNITS, smoke, progress)


def engines(progress: Progress, smoke: bool, device: str) -> Measured:
    """Measure three systems, and calls that do nothing, on every engine."""
    steps, tokens = (WARM_UP + 2, (6_000, 500)) if smoke else (60, (60_000, 5_000))
    few = {"max_steps": steps, "device": device}
    config = rnn.RNNConfig(embedding=64, hidden=64, dropout=0.0, **few)
    on_digits = hybrid.HybridConfig(manifold="stiefel", **few)
    trainings = {
        "rnn": (rnn, rnn.Job(config, data.Grammar(seed=1).corpus(*tokens))),
        "hybrid": (hybrid, hybrid.Job(on_digits)),
    }
    for name, episodes in {"per-step": 100, "local-policy": 1280}.items():
        options = {"max_episodes": 4 if smoke else episodes, "device": device}
        trainings[name] = reinforce, reinforce.ReinforceConfig(name, **options)
    made = {name: make() for name, make in ENGINES.items()}
    groups = [
        {f"{name}, {on}": partial(figures, *training, made[on]) for on in made}
        for name, training in trainings.items()
    ]
    calls = 20 if smoke else 1000
    groups.append({f"nothing, {on}": partial(nothing, made[on], calls) for on in made})
    return sweep(groups, UNITS, smoke, progress)


def figures(
    system: ModuleType, job: Any, engine: Workers | None, turn: int
) -> dict[str, float]:
    """One run's environment steps per second, and its time to solve, if it did.

    Of other systems the slowest trainer's step, and in the first turn the bytes of one.
    """
    if isinstance(job, reinforce.ReinforceConfig):  # with a seed for each turn
        score = _run(system, replace(job, seed=turn), engine).score
        found = {"environment steps": score.env_steps / score.seconds}
        return found | ({"time to solve": score.seconds} if score.solved else {})
    result = _run(system, job, engine)
    trainers = getattr(result, "trainers", result)
    trainers = trainers if isinstance(trainers, list) else [trainers]
    medians = [statistics.median(each.step_seconds[WARM_UP:]) for each in trainers]
    found = {"step": max(medians)}
    if engine == TorchRPC() and turn == 1:  # no turn sends more than another
        found["bytes"] = measured_bytes(system.run, job, job.config.max_steps - 1)
    return found


def _run(system: ModuleType, job: Any, engine: Workers | None) -> Any:
    if engine is not None:
        return system.run(job, engine, deadline=3600)
    with set_torch_threads(1):  # on models this small two would wait for each other
        return system.run_locally(job)


def nothing(engine: Workers | None, calls: int, _: int) -> dict[str, float]:
    """Seconds of a call that does nothing, and of its two workers' start and end."""
    if engine is None:
        return {}
    begin = time.perf_counter()
    roles = {"a": Role(_call, (engine, "b", calls)), "b": Role(serve)}
    call, calling = engine.launch(roles)["a"]
    return {"start and end": time.perf_counter() - begin - calling, "call": call}


def _call(engine: Workers, worker: str, calls: int) -> tuple[float, float]:
    """A worker's role: median seconds of a call, and the total."""
    reference, seconds = engine.remote(worker, list), []
    for _ in range(calls):
        begin = time.perf_counter()
        reference.rpc_sync().clear()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), sum(seconds)
