"""`cdopt-tutorial matrix`: run chapters and tests under other versions and machines."""

import argparse
import json
import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from cdopt_tutorial import data
from cdopt_tutorial.commands.common import Failed, add_json, bad_input, write_json
from cdopt_tutorial.commands.execute import DRIFTED, add_notebooks, named
from cdopt_tutorial.publish import matrix, project
from cdopt_tutorial.publish.reference import Reference, origin, processor
from cdopt_tutorial.scratch import scratch

# Each may be given as often as one likes, and all combinations are tried.
CHOICES = {
    "torch": ("VERSION", str, "a version of torch (default: the pinned)"),
    "cdopt": ("VERSION", str, "a version of cdopt (default: the pinned)"),
    "python": ("NAME", str, "a Python such as python3.12 (default: this one)"),
    "cpu": ("PATH", str, "default, avx2 or avx512, a code path (default: the CPU's)"),
    "threads": ("N", int, "threads of the operators (default: as they choose)"),
    "cores": ("N", int, "so many cores for all processes (default: all)"),
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each choice, and those of what is run and where it is kept."""
    parser.epilog = (
        "Each choice may be given several times, and all combinations are tried; where "
        "no version is chosen, in the environment that is there. "
        "exit code 1: an environment failed; 3: all ran, but a figure moved"
    )
    add_notebooks(parser)
    for name, (metavar, kind, what) in CHOICES.items():
        options = {"action": "append", "default": [], "help": what}
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, **options)
    update = "add what these machines gave to notebooks/reference.toml"
    parser.add_argument("--update-reference", action="store_true", help=update)
    without = "leave out the tests on Ray, Monarch and torchrun"
    parser.add_argument("--no-engines", action="store_true", help=without)
    add_json(parser)
    before = "put the runs that this file has before this one, such as the same file's"
    options = {"type": earlier, "default": [], "metavar": "FILE", "help": before}
    parser.add_argument("--after", **options)
    parser.set_defaults(run=run)


def earlier(name: str) -> list[matrix.Found]:
    """The runs in a file that this command wrote."""
    with bad_input():
        text = Path(name).read_bytes()
    return matrix.runs(json.loads(text))


def run(args: argparse.Namespace) -> int:
    """Try all combinations, one after another; what is done is written at once."""
    with bad_input():
        book = project.this_project()
        was = Reference(book)
        wanted = matrix.combine(book, args.python, args.torch, args.cdopt)
        machines = matrix.simulate(args.cpu, args.threads, args.cores)
        chapters = [book.relative(path) for path in named(args, book, {})]
    tried: list[matrix.Found] = []
    found = {"date": datetime.now(UTC).date().isoformat(), "command": _command(args)}
    found["machine"] = {"processor": processor(), "cores": os.cpu_count()}
    found["environments"] = tried
    progress = partial(print, flush=True)
    for versions in wanted:
        with scratch() as folder:
            engines = not args.no_engines
            place = matrix.Place(folder, book, versions, chapters, engines)
            for machine in machines:
                tried.append(matrix.try_out(place, machine, progress))
                write_json(args.json, {"runs": [*args.after, found]})
                if args.update_reference:
                    _update(was, tried[-1], place.passed)
    print("\n" + matrix.table(found))
    failed = [each for each in tried if each["failures"]]
    if failed:
        raise Failed(f"{len(failed)} of {len(tried)} environments failed")
    moved = [c for each in tried for c in each["changes"] if not c["holds"]]
    return DRIFTED if moved else 0


def _update(was: Reference, found: matrix.Found, passed: list[str]) -> None:
    """Add to the reference what chapters gave that ran through on a machine."""
    names = "cpu", "threads", "cores", "python", "torch"
    here, digest = origin(**{n: found[n] for n in names}), data.documentation_digest()
    for chapter in passed:
        was.update(chapter, found["figures"][chapter], here, digest)


def _command(args: argparse.Namespace) -> str:
    """The command line, without where things are."""
    given = [f"--{n} {Path(str(v)).name}" for n in CHOICES for v in getattr(args, n)]
    return " ".join(["cdopt-tutorial matrix", *given])
