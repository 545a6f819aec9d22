"""`cdopt-tutorial hybrid`: train by RPC and DistributedDataParallel together."""

import argparse
import math
from typing import Any

from cdopt_tutorial.commands.common import (
    JsonFile,
    add_against_local,
    add_run_options,
    bad_input,
    diverged,
    named_failure,
    told,
)

SMOKE_STEPS = 30


def add(commands) -> None:
    """Add the parser."""
    parser = commands.add_parser(
        "hybrid", help="chapter 5: train a table by RPC, and replicas of a layer by DDP"
    )
    option = parser.add_argument
    option("--num-trainers", type=int, default=2, metavar="N", help="default: 2")
    option("--semantics", default="exact", help="exact or original (default: exact)")
    option(
        "--shares",
        type=float,
        nargs="+",
        metavar="S",
        help="of the data, one for each trainer (default: equal ones)",
    )
    option("--embedding", type=int, default=16, metavar="N", help="default: 16")
    option("--manifold", default="none", help="stiefel, oblique or none")
    option("--where", default="trainer", help="whose weight: trainer or server")
    option("--by", default="dissolve", help="dissolve or cdopt (default: dissolve)")
    option("--penalty", type=float, default=0.5, metavar="P", help="default: 0.5")
    option("--optimizer", default="sgd", help="sgd or adam (default: sgd)")
    option("--lr", type=float, default=0.05, help="default: 0.05")
    option("--momentum", type=float, default=0.9, help="of sgd (default: 0.9)")
    option("--batch-size", type=int, default=64, metavar="N", help="default: 64")
    option("--epochs", type=int, default=30, metavar="N", help="default: 30")
    option("--max-steps", type=int, metavar="N", help="stop after these")
    option(
        "--step-deadline",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for a trainer's own part of a step (default: 30)",
    )
    add_against_local(parser)
    add_run_options(parser, device="auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, test, and compare; 1 if the training diverged."""
    from cdopt_tutorial import hybrid

    with bad_input():
        job = _job(args)
        results = JsonFile(args.json)
    try:
        with named_failure():
            result = hybrid.run(job, deadline=float("inf"), on_report=_log)
    except _Diverged:
        return diverged()
    found = _found(result)
    if args.against_local:
        local = hybrid.run_locally(job)
        found["max_parameter_difference"] = told(result.max_parameter_difference(local))
    results.write(found)
    print(_last_line(found))
    return 0


def _found(result) -> dict[str, Any]:
    """What goes into the JSON; losses in nats, null for what there is none of."""
    return result.as_json() | {
        "losses": result.losses,
        "max_parameter_difference": None,
    }


def _last_line(found: dict[str, Any]) -> str:
    """The JSON in short."""
    held = found["feasibility"]
    return (
        f"test accuracy {found['test_accuracy']:.3f}, loss {found['loss']:.3f}, "
        + ("" if held is None else f"feasibility {held:.1e}, ")
        + f"replica difference {found['replica_difference']:.1e}; "
        f"{found['samples_per_second']:.0f} samples/s; {found['transport']}"
    )


def _job(args: argparse.Namespace):
    """The job that the options describe.

    Raises:
        ValueError: an option is out of its range.
    """
    from cdopt_tutorial.hybrid import HybridConfig, Job, check

    config = HybridConfig(
        num_trainers=args.num_trainers,
        semantics=args.semantics,
        shares=args.shares and tuple(args.shares),
        embedding=args.embedding,
        manifold=args.manifold,
        where=args.where,
        by=args.by,
        penalty_param=args.penalty,
        optimizer=args.optimizer,
        lr=args.lr,
        momentum=args.momentum,
        batch_size=args.batch_size,
        epochs=args.epochs,
        max_steps=SMOKE_STEPS if args.smoke else args.max_steps,
        step_deadline=args.step_deadline,
        seed=args.seed,
        dtype="float64" if args.against_local else "float32",
        device=args.device,
    )
    if args.against_local and config.semantics == "original":
        raise ValueError("semantics original has no equal in one process")
    job = Job(config)
    check(job)
    return job


class _Diverged(Exception):
    """A loss is not finite."""


def _log(_, note) -> None:
    """Print what the first trainer reports after an epoch.

    Raises:
        _Diverged: at once, since weights that are not finite can't be projected.
    """
    score = note.valid
    if not math.isfinite(note.train_loss + (score.loss if score else 0)):
        raise _Diverged
    if score is not None:
        print(
            f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}\t"
            f"validation accuracy {score.accuracy:.3f}",
            flush=True,
        )
