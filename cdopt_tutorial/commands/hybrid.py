"""`cdopt-tutorial hybrid`: train by RPC and DistributedDataParallel together."""

import argparse
import math
from functools import partial

from cdopt_tutorial import hybrid
from cdopt_tutorial.commands import common, training

SMOKE = {"max_steps": 30}
add = partial(training.add_flags, config=hybrid.HybridConfig)


def run(args: argparse.Namespace) -> None:
    """Train, test, compare, and write: losses in nats, null where there is no value."""
    with common.bad_input():
        job = hybrid.Job(training.read_config(args, hybrid.HybridConfig, SMOKE))
        if args.against_local and job.config.semantics == "original":
            raise ValueError("semantics original has no equal in one process")
        hybrid.check(job)
        on = training.read_engine(args)
    result = hybrid.run(job, on=on, deadline=math.inf, on_report=training.log)
    found = result.as_json() | {"losses": result.losses}
    found["max_parameter_difference"] = training.difference(
        args.against_local, result.weights, partial(hybrid.run_locally, job)
    )
    common.write_json(args.json, found)
    feasibility = found["feasibility"]
    print(
        f"test accuracy {found['test_accuracy']:.3f}, loss {found['loss']:.3f}, "
        + ("" if feasibility is None else f"feasibility {feasibility:.1e}, ")
        + f"replica difference {found['replica_difference']:.1e}; "
        f"{found['samples_per_second']:.0f} samples/s; {found['transport']}"
    )
