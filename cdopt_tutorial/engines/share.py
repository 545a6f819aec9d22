"""Share out jobs that need nothing of each other, as the seeds of a study."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from cdopt_tutorial.engines.launch import Role, launch
from cdopt_tutorial.engines.process import report


def share(
    function: Callable[..., Any],
    jobs: Iterable[tuple],
    num_workers: int = 2,
    on_done: Callable[[int, Any], None] | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function once for each job, and return what it returned, in their order.

    Called by the parent. Each worker has one thread, so how many there are does not
    change what comes out.

    Args:
        function: what to run; a worker must be able to import it.
        jobs: the positional arguments of each run.
        num_workers: at least 1; each takes every so many-th job.
        on_done: called after each job as ``on_done(number, result)``, with the number
            of jobs that are done, whichever they are.
        options: of :func:`~cdopt_tutorial.engines.launch.launch`, with its errors.
    """
    jobs = list(jobs)
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, but must be at least 1")
    num_workers = min(num_workers, len(jobs))
    roles = {
        f"worker{rank}": Role(_run_each, (function, jobs[rank::num_workers]))
        for rank in range(num_workers)
    }
    numbers = itertools.count(1)

    def tell(_: str, result: Any) -> None:
        if on_done is not None:
            on_done(next(numbers), result)

    # Nobody calls anybody, so nobody has to poll for calls.
    found = launch(roles, polling=False, on_report=tell, **options) if jobs else {}
    results: list[Any] = [None] * len(jobs)
    for rank in range(num_workers):
        results[rank::num_workers] = found[f"worker{rank}"]
    return results


def _run_each(function: Callable[..., Any], jobs: list[tuple]) -> list[Any]:
    results = []
    for job in jobs:
        results.append(function(*job))
        report(results[-1])
    return results
