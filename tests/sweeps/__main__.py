"""`make lost`, `make soak`, `make machines`: run a sweep, and print its table."""

import argparse
import sys
from functools import partial
from importlib import import_module

from hosts import check

from cdopt_tutorial.bench.rows import report, table
from cdopt_tutorial.commands.common import add_run_flags, write_json
from sweeps import matrix


def main() -> int:
    """Read the flags; a sweep that needs hosts ends at once where none can be made."""
    parser = argparse.ArgumentParser(prog="python -m sweeps")
    sweeps = parser.add_subparsers(dest="sweep", required=True)
    add_run_flags(sweeps.add_parser("lost", help="lose workers and hosts"))
    add_run_flags(sweeps.add_parser("soak", help="stop launches, commands, kernels"))
    matrix.add(sweeps.add_parser("matrix", help="try other versions and machines"))
    args = parser.parse_args()
    if args.sweep == "matrix":
        return matrix.run(args)
    if args.sweep == "lost":
        try:
            check()
        except ValueError as why:
            parser.error(str(why))
    sweep = import_module(f"sweeps.{args.sweep}")
    measured, more = sweep.measure(partial(print, flush=True), args.smoke)
    write_json(args.json, report(measured, **more))
    print(table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
