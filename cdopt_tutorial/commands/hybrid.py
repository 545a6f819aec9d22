"""`cdopt-tutorial hybrid`: train by RPC and DistributedDataParallel together."""

import argparse
import math
from functools import partial

from cdopt_tutorial import hybrid
from cdopt_tutorial.commands import common, training
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.training import Progress

SMOKE = {"max_steps": 30}
add = partial(training.add_flags, config=hybrid.HybridConfig)


def run(args: argparse.Namespace) -> None:
    """Train, test, and compare; losses are in nats, null is what there is none of."""
    with common.bad_input():
        job = hybrid.Job(training.read_config(args, hybrid.HybridConfig, SMOKE))
        if args.against_local and job.config.semantics == "original":
            raise ValueError("semantics original has no equal in one process")
        hybrid.check(job)
        engine = training.read_engine(args)
    result = hybrid.run(job, engine, deadline=math.inf, on_report=_log)
    found = result.as_json() | {"losses": result.losses}
    found["max_parameter_difference"] = training.difference(
        args.against_local,
        lambda: max_difference(result.weights, hybrid.run_locally(job).weights),
    )
    common.write_json(args.json, found)
    held = found["feasibility"]
    print(
        f"test accuracy {found['test_accuracy']:.3f}, loss {found['loss']:.3f}, "
        + ("" if held is None else f"feasibility {held:.1e}, ")
        + f"replica difference {found['replica_difference']:.1e}; "
        f"{found['samples_per_second']:.0f} samples/s; {found['transport']}"
    )


def _log(_, note: Progress) -> None:
    score = note.valid  # checked at once: what is not finite can't be projected
    training.check_finite(note.train_loss + (score.loss if score else 0))
    if score is not None:
        line = f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}"
        print(f"{line}\tvalidation accuracy {score.accuracy:.3f}", flush=True)
