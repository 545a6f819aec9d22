"""The systems on each engine: start and end, a call that does nothing, steps."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cdopt_tutorial import data, hybrid, reinforce
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.engines import Role, serve
from cdopt_tutorial.engines.on_ray import OnRay
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.workers import Workers

WARM_UP = 5
EPISODES = {"per-step": 100, "local-policy": 1280}
BASELINE = "torch RPC"
ENGINES = {BASELINE: TorchRPC, "torch RPC, cut": partial(TorchRPC, "cut"), "Ray": OnRay}
UNITS = {"start and end": "s", "call": "s", "rnn": "s/step", "hybrid": "images/s"}
UNITS |= dict.fromkeys(EPISODES, "steps/s")

# A system with `run` and `run_locally`, its job, and the speed of what either returns.
Training = tuple[Any, Any, Callable[[Any], float]]


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Run every system on every engine, in turns; ValueError where Ray is missing."""
    trainings, calls = make_trainings(smoke, device), 20 if smoke else 1000
    variants = {"one process": partial(_alone, trainings)}
    for name, engine in ENGINES.items():
        variants[name] = partial(_figures, trainings, engine(), calls)
    return sweep(variants, 1 if smoke else 5, progress, UNITS, BASELINE)


def make_trainings(smoke: bool, device: str) -> dict[str, Training]:
    """All trainings, by the names of their rows."""
    steps, tokens = (WARM_UP + 2, (6_000, 500)) if smoke else (60, (60_000, 5_000))
    few = {"max_steps": steps, "device": device}
    config = rnn.RNNConfig(embedding=64, hidden=64, dropout=0.0, **few)
    job = rnn.Job(config, data.Grammar(seed=1).corpus(*tokens))
    found: dict[str, Training] = {"rnn": (rnn, job, _step_seconds)}
    job = hybrid.Job(hybrid.HybridConfig(manifold="stiefel", **few))
    found["hybrid"] = hybrid, job, lambda of: of.as_json()["samples_per_second"]
    for conversation, episodes in EPISODES.items():
        few = {"max_episodes": 4 if smoke else episodes, "device": device}
        job = reinforce.ReinforceConfig(conversation, **few)
        found[conversation] = reinforce, job, _steps_per_second
    return found


def _alone(trainings: dict[str, Training], _: int) -> dict[str, float]:
    return {
        name: speed(system.run_locally(job))
        for name, (system, job, speed) in trainings.items()
    }


def _figures(
    trainings: dict[str, Training], engine: Workers, calls: int, _: int
) -> dict[str, float]:
    begin = time.perf_counter()
    roles = {"a": Role(null_call, (engine, "b", calls)), "b": Role(serve)}
    call, calling = engine.launch(roles)["a"]
    found = {"start and end": time.perf_counter() - begin - calling, "call": call}
    for name, (system, job, speed) in trainings.items():
        found[name] = speed(system.run(job, engine))
    return found


def null_call(engine: Workers, worker: str, calls: int) -> tuple[float, float]:
    """Median seconds of a call that does nothing, and of all; a worker's role."""
    reference, seconds = engine.remote(worker, list), []
    for _ in range(calls):
        begin = time.perf_counter()
        reference.rpc_sync().clear()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), sum(seconds)


def _step_seconds(found: rnn.History | list[rnn.History]) -> float:
    first = found[0] if isinstance(found, list) else found
    return statistics.median(first.step_seconds[WARM_UP:])


def _steps_per_second(training: reinforce.Training) -> float:
    return training.score.env_steps / training.score.seconds
