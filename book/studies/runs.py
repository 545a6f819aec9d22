"""What the studies share: options, runs that are kept, and the file they write."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch
from joblib import cpu_count

from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.run import share

Job = dict[str, Any]  # keyword arguments of a run, in JSON's types

NAME = Path(sys.argv[0]).stem
LOAD = os.getloadavg()  # before the study


def arguments(about: str) -> argparse.Namespace:
    """A script's options; a ValueError if there is no such device."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    smoke = "a run of seconds, to see that it works"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    device = "auto, cpu, cuda or cuda:N, to compute on (default: cpu)"
    parser.add_argument("--device", default="cpu", help=device)
    out = f"write the results to this file (default: {NAME}.json, here)"
    parser.add_argument("--out", type=Path, default=f"{NAME}.json", help=out)
    options = parser.parse_args()
    options.device = pick_device(options.device)
    return options


def keep(
    out: Path, function: Callable[..., dict[str, Any]], jobs: Sequence[Job]
) -> list[dict[str, Any]]:
    """Run each job on one of all cores; its arguments and results, in the jobs' order.

    A file beside ``out`` has a line for each finished job, which is not run again.
    """
    kept = _read(path := out.with_suffix(".runs"))
    missing = [(function, job) for job in jobs if _key(job) not in kept]
    print(f"{len(missing)} runs, {len(jobs) - len(missing)} are kept already")

    def note(done: int, finished: tuple[Job, dict[str, Any]]) -> None:
        job, result = finished
        kept[_key(job)] = result
        print(f"{done} of {len(missing)}: {job}", flush=True)
        with path.open("a") as file:
            file.write(json.dumps(finished) + "\n")

    share(_run, missing, cpu_count(), note)
    return [job | kept[_key(job)] for job in jobs]


def _run(function: Callable[..., dict[str, Any]], job: Job) -> tuple[Job, dict]:
    return job, function(**job)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    kept = {}
    if path.exists():
        for line in (text := path.read_text()).splitlines():
            with suppress(ValueError):  # the last one, if its writing was cut short
                job, result = json.loads(line)
                kept[_key(job)] = result
        if text and not text.endswith("\n"):
            path.write_text(text + "\n")
    return kept


def _key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)


def write(path: Path, **results: Any) -> None:
    """Write results as JSON, a line for each row; floats are rounded to six digits."""
    machine = {"cores": cpu_count(), "python": platform.python_version()}
    machine |= {"torch": torch.__version__, "system": platform.system()}
    about = {"command": f"python book/studies/{NAME}.py", "date": str(date.today())}
    about |= {"load": [LOAD, os.getloadavg()], "machine": machine}
    shown = _rounded(about | results)
    lines = [f' "{key}": {_text(value)}' for key, value in shown.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"wrote {path}")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [*map(_rounded, value)] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    rows = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(rows, list) or not isinstance(rows[0], dict | list):
        return json.dumps(value)
    lines = [f"  {json.dumps(row)}" for row in rows]
    if isinstance(value, dict):
        lines = [f"  {json.dumps(k)}: {json.dumps(row)}" for k, row in value.items()]
    ends = "{}" if isinstance(value, dict) else "[]"
    return f"{ends[0]}\n" + ",\n".join(lines) + f"\n {ends[1]}"
