"""`make lost` and `make soak`: run a sweep, print its table, write its JSON."""

import argparse
from functools import partial
from importlib import import_module

from hosts import check

from cdopt_tutorial.bench.rows import report, table
from cdopt_tutorial.commands.common import add_run_flags, write_json


def main() -> None:
    """Read the flags; a sweep that needs hosts ends at once where none can be made."""
    parser = argparse.ArgumentParser(prog="python -m sweeps")
    parser.add_argument("sweep", choices=["lost", "soak"])
    add_run_flags(parser)
    args = parser.parse_args()
    if args.sweep == "lost":
        try:
            check()
        except ValueError as why:
            parser.error(str(why))
    sweep = import_module(f"sweeps.{args.sweep}")
    measured, more = sweep.measure(partial(print, flush=True), args.smoke)
    write_json(args.json, report(measured, **more))
    print(table(measured))


if __name__ == "__main__":
    main()
