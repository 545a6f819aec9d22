"""`cdopt-tutorial hybrid`: train by RPC and DistributedDataParallel together."""

import argparse
import math

from cdopt_tutorial.commands.common import (
    add_training_flags,
    bad_input,
    check_finite,
    named_failure,
    print_difference,
    read_config,
    write_json,
)
from cdopt_tutorial.hybrid import HybridConfig, Job, Progress, check, run_locally
from cdopt_tutorial.hybrid import run as run_on_workers

SMOKE_STEPS = 30


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_training_flags(parser, HybridConfig, run)


def run(args: argparse.Namespace) -> int:
    """Train, test, and compare; losses are in nats, null is what there is none of."""
    with bad_input():
        job = read_job(args)
    with named_failure():
        result = run_on_workers(job, deadline=math.inf, on_report=_log)
    difference = None
    if args.against_local:
        local = run_locally(job)
        difference = print_difference(result.max_parameter_difference(local))
    found = result.as_json() | {
        "losses": result.losses,
        "max_parameter_difference": difference,
    }
    write_json(args.json, found)
    held = found["feasibility"]
    print(
        f"test accuracy {found['test_accuracy']:.3f}, loss {found['loss']:.3f}, "
        + ("" if held is None else f"feasibility {held:.1e}, ")
        + f"replica difference {found['replica_difference']:.1e}; "
        f"{found['samples_per_second']:.0f} samples/s; {found['transport']}"
    )
    return 0


def read_job(args: argparse.Namespace) -> Job:
    """The job that the flags describe.

    Raises:
        ValueError: a value is out of its range.
    """
    fixed = {"max_steps": SMOKE_STEPS} if args.smoke else {}
    config = read_config(args, HybridConfig, **fixed)
    if args.against_local and config.semantics == "original":
        raise ValueError("semantics original has no equal in one process")
    job = Job(config)
    check(job)
    return job


def _log(_, note: Progress) -> None:
    """Print what the first trainer reports after an epoch.

    Raises:
        Failed: at once, since weights that are not finite can't be projected.
    """
    score = note.valid
    check_finite(note.train_loss + (score.loss if score else 0))
    if score is not None:
        print(
            f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}\t"
            f"validation accuracy {score.accuracy:.3f}",
            flush=True,
        )
