"""`cdopt-tutorial hybrid`: train by RPC and DistributedDataParallel together."""

import argparse
import math

from cdopt_tutorial import hybrid
from cdopt_tutorial.commands import common, training
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.hybrid import HybridConfig, Job
from cdopt_tutorial.training import Progress

SMOKE = {"max_steps": 30}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    training.add_flags(parser, HybridConfig, run)


def run(args: argparse.Namespace) -> int:
    """Train, test, and compare; losses are in nats, null is what there is none of."""
    with common.bad_input():
        job = Job(training.read_config(args, HybridConfig, SMOKE))
        if args.against_local and job.config.semantics == "original":
            raise ValueError("semantics original has no equal in one process")
        hybrid.check(job)
        engine = training.read_engine(args)
    result = hybrid.run(job, engine, deadline=math.inf, on_report=_log)
    found = result.as_json() | {"losses": result.losses}
    found["max_parameter_difference"] = None
    if args.against_local:
        gap = max_difference(result.weights, hybrid.run_locally(job).weights)
        found["max_parameter_difference"] = training.print_difference(gap)
    common.write_json(args.json, found)
    held = found["feasibility"]
    print(
        f"test accuracy {found['test_accuracy']:.3f}, loss {found['loss']:.3f}, "
        + ("" if held is None else f"feasibility {held:.1e}, ")
        + f"replica difference {found['replica_difference']:.1e}; "
        f"{found['samples_per_second']:.0f} samples/s; {found['transport']}"
    )
    return 0


def _log(_, note: Progress) -> None:
    """Print what the first trainer reports after an epoch."""
    score = note.valid  # checked at once: what is not finite can't be projected
    training.check_finite(note.train_loss + (score.loss if score else 0))
    if score is not None:
        line = f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}"
        print(f"{line}\tvalidation accuracy {score.accuracy:.3f}", flush=True)
