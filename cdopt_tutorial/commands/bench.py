"""`cdopt-tutorial bench`: measure speed."""

import argparse
import os
from functools import partial

from cdopt_tutorial.bench import ahead, shards, speed
from cdopt_tutorial.bench.rows import report, table
from cdopt_tutorial.commands import common
from cdopt_tutorial.engines.on_ray import OnRay
from cdopt_tutorial.engines.seam.device import pick_device

BENCHES = {
    "engines": "chapters 1, 2 and 5 in one process, over torch RPC, and on Ray",
    "hybrid": "a step of chapter 5's hybrid: local, 1, 2, 4 trainers",
    "reinforce": "chapter 1's four conversations, until solved",
    "rnn": "a step of chapter 2's RNN: local, both cuts, two trainers",
    "rollouts": "chapter 8's observers, 1 to 16: measured and predicted",
    "shards": "a constrained step, and word vectors, in rows on two ranks and gathered",
}
MEASURES = {name: partial(speed.systems, name) for name in speed.SYSTEMS} | {
    "engines": speed.engines,
    "rollouts": ahead.measure,
    "shards": shards.measure,
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each bench."""
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    for name, what in BENCHES.items():
        bench = benches.add_parser(name, help=what)
        common.add_run_flags(bench)
        common.add_device(bench)
        bench.set_defaults(bench=name)


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, write the JSON."""
    with common.bad_input():
        device = pick_device(args.device)
        if args.bench == "engines":
            OnRay()  # a ValueError if Ray is missing
    progress, measure = partial(print, flush=True), MEASURES[args.bench]
    before = os.getloadavg()
    measured, more = measure(progress, args.smoke, device)
    common.write_json(args.json, report(measured, before, **more))
    print(table(measured))
