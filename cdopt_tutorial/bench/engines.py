"""The systems on each engine: start and end, a call that does nothing, steps."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cdopt_tutorial import data, hybrid, reinforce
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.engines import Role, serve
from cdopt_tutorial.engines.on_ray import OnRay
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.hybrid import HybridConfig
from cdopt_tutorial.parameter_server import RNNConfig
from cdopt_tutorial.reinforce import ReinforceConfig

TURNS = 5
CALLS, SMOKE_CALLS = 1000, 20
EPISODES = {"per-step": 100, "local-policy": 1280}
STEPS, WARM_UP = 60, 5
SMALL = {"embedding": 64, "hidden": 64, "dropout": 0.0}
TOKENS = 60_000, 5_000  # to train on, to validate on
BASELINE, ONE_PROCESS = "torch RPC", "one process"
ENGINES = {BASELINE: TorchRPC(), "torch RPC, cut": TorchRPC("cut")}
UNITS = {"start and end": "s", "call": "s", "rnn": "s/step", "hybrid": "images/s"}
UNITS |= dict.fromkeys(EPISODES, "steps/s")


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Run every system on every engine, in turns; ValueError where Ray is missing."""
    variants = {ONE_PROCESS: partial(_alone, smoke, device)}
    for name, engine in (ENGINES | {"Ray": OnRay()}).items():
        variants[name] = partial(_figures, engine, smoke, device)
    return sweep(variants, 1 if smoke else TURNS, progress, UNITS, BASELINE)


def _figures(engine: Workers, smoke: bool, device: str, _: int) -> dict[str, float]:
    begin, calls = time.perf_counter(), SMOKE_CALLS if smoke else CALLS
    roles = {"a": Role(null_call, (engine, "b", calls)), "b": Role(serve)}
    call, calling = engine.launch(roles)["a"]
    found = {"start and end": time.perf_counter() - begin - calling, "call": call}
    on = {"engine": engine}
    return found | _trainings(
        smoke,
        device,
        partial(reinforce.run, **on),
        lambda job: rnn.run(job, **on)[0],
        partial(hybrid.run, **on),
    )


def _alone(smoke: bool, device: str, _: int) -> dict[str, float]:
    local = reinforce.run_locally, rnn.run_locally, hybrid.run_locally
    return _trainings(smoke, device, *local)


def _trainings(
    smoke: bool,
    device: str,
    run_agent: Callable,
    run_rnn: Callable,
    run_hybrid: Callable,
) -> dict[str, float]:
    """The speed of each system, trained by these functions."""
    found = {}
    for name, config in _conversations(smoke).items():
        score = run_agent(replace(config, device=device)).score
        found[name] = score.env_steps / score.seconds
    found["rnn"] = _step(run_rnn(_rnn_job(smoke, device)))
    result = run_hybrid(_hybrid_job(smoke, device))
    return found | {"hybrid": result.as_json()["samples_per_second"]}


def null_call(engine: Workers, worker: str, calls: int) -> tuple[float, float]:
    """Median seconds of a call that does nothing, and of all; a worker's role."""
    reference, seconds = engine.remote(worker, list), []
    for _ in range(calls):
        begin = time.perf_counter()
        reference.rpc_sync().clear()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), sum(seconds)


def _conversations(smoke: bool) -> dict[str, ReinforceConfig]:
    if smoke:
        return {"per-step": ReinforceConfig("per-step", max_episodes=4)}
    return {name: ReinforceConfig(name, max_episodes=n) for name, n in EPISODES.items()}


def _rnn_job(smoke: bool, device: str) -> rnn.Job:
    config = RNNConfig(
        max_steps=WARM_UP + 2 if smoke else STEPS, device=device, **SMALL
    )
    tokens = [number // 10 if smoke else number for number in TOKENS]
    return rnn.Job(config, data.Grammar(seed=1).corpus(*tokens))


def _step(history: rnn.History) -> float:
    return statistics.median(history.step_seconds[WARM_UP:])


def _hybrid_job(smoke: bool, device: str) -> hybrid.Job:
    steps = WARM_UP if smoke else STEPS
    return hybrid.Job(HybridConfig(manifold="stiefel", device=device, max_steps=steps))
