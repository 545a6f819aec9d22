"""`make lost`, `make soak`, `make machines`: run a sweep, and say what came of it."""

import argparse
import json
import sys
from importlib import import_module

from hosts import check

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
    return disturb(args)


def disturb(args: argparse.Namespace) -> int:
    """Disturb runs, a line of JSON for each; 1 if one did not end as promised."""
    runs, wrong = [], []
    for run in import_module(f"sweeps.{args.sweep}").disturbed(args.smoke):
        print(json.dumps(run), flush=True)  # so that nothing is lost on the way
        runs.append(run)
        wrong += [run["what"]] if run["wrong"] else []
    write_json(args.json, {"runs": runs})
    print(f"{len(runs)} runs, not as promised: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
