"""`cdopt-tutorial bench`: measure speed, or try learning rates."""

import argparse
import os
from functools import partial

from cdopt_tutorial.bench import ahead, lag, rates, shapes, shards, speed, study
from cdopt_tutorial.bench.rows import report, table
from cdopt_tutorial.commands import common
from cdopt_tutorial.engines.on_ray import OnRay
from cdopt_tutorial.engines.seam.device import pick_device
from cdopt_tutorial.parameter_server import study as recurrent
from cdopt_tutorial.sharding import study as transformers

BENCHES = {
    "constraints": "a step of a constrained layer, by its shape, and by each method",
    "copying": "the learning rates of chapter 3's recurrent models, on two tasks",
    "engines": "chapters 1, 2 and 5 in one process, over torch RPC, and on Ray",
    "hybrid": "a step of chapter 5's hybrid: local, 1, 2, 4 trainers",
    "lag": "what chapter 8's lag costs: episodes and seconds until it is solved",
    "reinforce": "chapter 1's four conversations, until solved",
    "rnn": "a step of chapter 2's RNN: local, both cuts, two trainers",
    "recurrent": "chapter 4's recurrent networks and controls, each tuned: an hour",
    "rollouts": "chapter 8's observers, 1 to 16: measured and predicted",
    "shards": "a constrained step, and word vectors, in rows on two ranks and gathered",
    "study": "chapter 6's transformers and controls, each tuned: an hour",
}
MEASURES = {name: partial(speed.systems, name) for name in speed.SYSTEMS} | {
    "constraints": shapes.measure,
    "copying": rates.copying,
    "engines": speed.engines,
    "lag": lag.measure,
    "recurrent": partial(study.measure, recurrent.STUDY),
    "rollouts": ahead.measure,
    "shards": shards.measure,
    "study": partial(study.measure, transformers.STUDY),
}
STUDIES = "lag", "recurrent", "study"  # of many runs, each of which can be kept


def add(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each bench."""
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    for name, what in BENCHES.items():
        bench = benches.add_parser(name, help=what)
        common.add_run_flags(bench)
        common.add_device(bench)
        if name in STUDIES:
            text = "keep each run in this file, and go on from the runs in it"
            kept = {"type": common.writable, "metavar": "FILE", "help": text}
            bench.add_argument("--runs", **kept)
        bench.set_defaults(bench=name)


def run(args: argparse.Namespace) -> None:
    """Measure, print the table, write the JSON."""
    with common.bad_input():
        device = pick_device(args.device)
        if args.bench == "engines":
            OnRay()  # a ValueError if Ray is missing
    kept = (args.runs,) if args.bench in STUDIES else ()
    progress, measure = partial(print, flush=True), MEASURES[args.bench]
    before = os.getloadavg()
    measured, more = measure(progress, args.smoke, device, *kept)
    common.write_json(args.json, report(measured, before, **more))
    print(table(measured))
