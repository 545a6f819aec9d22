"""Share out independent jobs, such as the seeds of a study."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from cdopt_tutorial.run.launch import Role, launch
from cdopt_tutorial.run.worker import report


def share(
    function: Callable[..., Any],
    jobs: Iterable[tuple],
    num_workers: int = 2,
    on_done: Callable[[int, Any], None] | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function once for each job; return the results in the order of the jobs.

    A job is a tuple of positional arguments; ``on_done(jobs_done, result)`` is called
    after each. Workers have one thread each, so their number does not change the
    results. Options and errors are those of ``launch``, but there is no
    deadline unless one is given: jobs wait for nobody, and a busy machine may be slow.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, but must be at least 1")
    numbered = list(enumerate(jobs))
    roles = {
        f"worker{rank}": Role(_run_each, (function, numbered[rank::num_workers]))
        for rank in range(min(num_workers, len(numbered)))
    }
    results: dict[int, Any] = {}

    def note(_: str, record: tuple[int, Any]) -> None:
        number, result = record
        results[number] = result
        if on_done is not None:
            on_done(len(results), result)

    if roles:
        launch(roles, on_report=note, **{"deadline": math.inf} | options)
    return [results[number] for number, _ in numbered]


def _run_each(function: Callable[..., Any], jobs: list[tuple[int, tuple]]) -> None:
    for number, job in jobs:
        report((number, function(*job)))
