"""`cdopt-tutorial hybrid`: train a table by RPC, and replicas of a layer by DDP."""

from functools import partial
from typing import Any

from cdopt_tutorial import hybrid
from cdopt_tutorial.commands.training import ComparedFlags as Flags
from cdopt_tutorial.commands.training import difference, log
from cdopt_tutorial.hybrid import HybridConfig as Config

SMOKE = {"max_steps": 30}


def prepare(config: Config, flags: Flags) -> hybrid.Job:
    """The job, on the digits."""
    if flags.against_local and config.semantics == "original":
        raise ValueError("semantics original has no equal in one process")
    job = hybrid.Job(config)
    hybrid.check(job)
    return job


def train(job: hybrid.Job, flags: Flags, **options: Any) -> dict[str, Any]:
    """Train, test, and compare."""
    result = hybrid.run(job, on_report=log, **options)
    repeat = partial(hybrid.run_locally, job)
    same = difference(flags.against_local, result.weights, repeat)
    return result.figures() | same
