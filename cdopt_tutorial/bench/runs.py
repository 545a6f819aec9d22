"""The runs of a long study, on all cores; a file keeps each finished one."""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from joblib import cpu_count

from cdopt_tutorial.bench.rows import Progress
from cdopt_tutorial.engines import share

Job = dict[str, Any]  # keyword arguments of a run, in JSON's types


def keep(
    path: Path | None,
    function: Callable[..., dict[str, Any]],
    jobs: Sequence[Job],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Each job merged with what the function returned for it, in the jobs' order.

    The file has a line for each finished job, which is not run again.
    """
    kept = _read(path)
    missing = [(function, job) for job in jobs if _key(job) not in kept]
    progress(f"{len(missing)} runs, {len(jobs) - len(missing)} are kept already")

    def note(done: int, found: tuple[Job, dict[str, Any]]) -> None:
        job, result = found
        kept[_key(job)] = result
        progress(f"{done} of {len(missing)}: {job} {_short(result)}")
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps([job, result]) + "\n")

    share(_run, missing, cpu_count(), note, deadline=math.inf)
    return [job | kept[_key(job)] for job in jobs]


def _run(function: Callable[..., dict[str, Any]], job: Job) -> tuple[Job, dict]:
    return job, function(**job)


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    found = {}
    if path is not None and path.exists():
        for line in (text := path.read_text()).splitlines():
            with suppress(ValueError):  # the last one, if its writing was cut short
                job, result = json.loads(line)
                found[_key(job)] = result
        if text and not text.endswith("\n"):
            path.write_text(text + "\n")
    return found


def _key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)


def _short(result: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in result.items() if not isinstance(v, list)}
