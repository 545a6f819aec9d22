"""The bare programs of chapters 1, 2, 5, 6 and 7, from their notebooks."""

import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from cdopt_tutorial.publish.execute import end_with_parent
from cdopt_tutorial.publish.programs import read_programs
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.scratch import scratch

_MAIN = '\nif __name__ == "__main__":\n'

# Behind a program's own definitions: each worker writes when a function was called,
# into a file of its own, since what two print at once may come out mixed.
_TIMED = """
import json, os, time
_calls, _function, _run_worker = [], {function}, run_worker

def _called(*args, **kwargs):
    _calls.append(time.perf_counter())
    return _function(*args, **kwargs)

def run_worker(*args):
    _run_worker(*args)
    if _calls:
        with open(f"calls-{{os.getpid()}}.json", "w") as file:
            json.dump(_calls, file)

{function} = _called
"""


def program(name: str, more: str = "") -> str:
    """The text of a program, with more code behind its definitions.

    ValueError if no chapter has it, or it does not end with its start.
    """
    text = read_programs(this_project()).get(f"{name}.py", "")
    if text.count(_MAIN) != 1:
        raise ValueError(f"no chapter has a {name}.py with one start")
    return extend(text, more) if more else text


def extend(text: str, more: str) -> str:
    """A program with more code behind its definitions, and before its start."""
    return text.replace(_MAIN, f"\n{more}\n{_MAIN}")


def write(folder: Path, name: str, more: str = "") -> Path:
    """Write a program into a folder; its path."""
    path = folder / f"{name}.py"
    path.write_text(program(name, more))
    return path


def alone() -> dict[str, str]:
    """An environment in which a program finds what is installed, and no path."""
    return {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}


def call_times(text: str, function: str) -> list[list[float]]:
    """Run a program by itself: the seconds at which each worker called a function.

    Of the workers that called it, in no order. CalledProcessError if the program fails.
    """
    with scratch() as folder:
        path = Path(folder, "bare.py")
        path.write_text(extend(text, _TIMED.format(function=function)))
        command = [sys.executable, str(path)]
        env = alone() | {"TMPDIR": folder}  # where the program makes one of its own
        options = {"cwd": folder, "env": env, "preexec_fn": end_with_parent}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **options)
        files = Path(folder).glob("calls-*.json")
        return [json.loads(path.read_text()) for path in files]


def step_seconds(text: str, function: str, warm_up: int) -> float:
    """The slowest worker's median seconds from call to call, after a warm-up."""
    times = call_times(text, function)
    steps = [[after - before for before, after in pairwise(each)] for each in times]
    return max(statistics.median(each[warm_up:]) for each in steps)
