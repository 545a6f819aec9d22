"""A training that goes on from its checkpoint after a worker has died."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cdopt_tutorial.engines.watch.errors import WorkerLost
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.parameter_server import checkpoint
from cdopt_tutorial.parameter_server.model import History
from cdopt_tutorial.parameter_server.system import Job, run


def run_again(
    job: Job,
    engine: Workers | None = None,
    *,
    max_restarts: int,
    on_restart: Callable[[WorkerLost, Job], None] = lambda error, job: None,
    **options: Any,
) -> list[History]:
    """As ``run``; all workers begin again where one was lost, so many times at most.

    They go on from the checkpoint that the job keeps, so only the steps since then are
    done again; ``on_restart(error, job)`` is called first. A ValueError where
    :func:`check` refuses the number; the last WorkerLost once there were more.
    """
    check(job, max_restarts)
    while True:
        try:
            return run(job, engine, **options)
        except WorkerLost as error:
            if not max_restarts:
                raise
            max_restarts -= 1
            if job.keep.exists():  # else it had not come so far
                job = replace(job, resume=checkpoint.load(job.keep))
            on_restart(error, job)


def check(job: Job, max_restarts: int) -> None:
    """A ValueError for a negative number, or one of a job that keeps nothing."""
    if max_restarts < 0:
        raise ValueError(f"max-restarts is {max_restarts}, but must be at least 0")
    if max_restarts and job.keep is None:
        raise ValueError(f"max-restarts is {max_restarts}, which needs a checkpoint")
