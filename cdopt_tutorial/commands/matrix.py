"""`cdopt-tutorial matrix`: run chapters and tests under other versions."""

import argparse
import os
import platform
from datetime import UTC, datetime
from functools import partial

from cdopt_tutorial.commands.common import Failed, add_json, bad_input, write_json
from cdopt_tutorial.commands.execute import DRIFTED
from cdopt_tutorial.publish import matrix, project
from cdopt_tutorial.publish.reference import Reference


def add(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each version that can be chosen, and that of the results."""
    parser.epilog = "exit code 1: an environment failed; 3: all ran, but a figure moved"
    for name in ("torch", "cdopt"):
        what = f"a version of {name} to try, as often as you like (default: the pinned)"
        parser.add_argument(
            f"--{name}", metavar="VERSION", action="append", default=[], help=what
        )
    what = "a Python to make environments with, such as python3.12 (default: this one)"
    parser.add_argument(
        "--python", metavar="NAME", action="append", default=[], help=what
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Try all combinations, one after another; what is done is written at once."""
    with bad_input():
        book = project.this_project()
        Reference(book)
        wanted = matrix.combine(book, args.python, args.torch, args.cdopt)
    machine = {"processor": platform.machine(), "cores": os.cpu_count()}
    tried: list[matrix.Found] = []
    found = {"date": datetime.now(UTC).date().isoformat(), "machine": machine}
    found |= {"profile": matrix.PROFILE, "environments": tried}
    for versions in wanted:
        tried.append(matrix.try_out(book, versions, partial(print, flush=True)))
        write_json(args.json, found)
    print("\n" + matrix.table(found))
    failed = [each for each in tried if each["failures"]]
    if failed:
        raise Failed(f"{len(failed)} of {len(tried)} environments failed")
    moved = [c for each in tried for c in each["changes"] if not c["holds"]]
    return DRIFTED if moved else 0
