"""`cdopt-tutorial shard`: train a transformer in copies, shards, parts or stages."""

import argparse
import math
from typing import Any

from cdopt_tutorial import sharding
from cdopt_tutorial.commands import common, training
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.sharding import Job, Result, ShardConfig, costs

SMOKE = {"max_steps": 10, "width": 16, "seq_len": 8}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    training.add_flags(parser, ShardConfig, run)


def run(args: argparse.Namespace) -> int:
    """Train, measure, compare; losses are in nats, null is what there is none of."""
    with common.bad_input():
        job = Job(training.read_config(args, ShardConfig, SMOKE))
        sharding.check(job)
        engine = training.read_engine(args)
    result = sharding.run(job, engine, deadline=math.inf)
    training.check_finite(result.losses[-1])
    perplexity = sharding.perplexity(job, result.weights)
    training.check_finite(perplexity)
    found = _found(job, result, perplexity)
    if args.against_local:
        gap = max_difference(result.weights, sharding.run_locally(job).weights)
        found["max_parameter_difference"] = training.print_difference(gap)
    common.write_json(args.json, found)
    print(
        f"validation perplexity {found['valid_perplexity']:.1f}; a step takes "
        f"{found['seconds_per_step'] * 1e3:.1f} ms and {found['bytes_per_step']:,.0f} "
        f"bytes, {found['peak_memory_bytes']:,} bytes of memory on a rank "
        f"({result.ranks[0].transport})"
    )
    return 0


def _found(job: Job, result: Result, perplexity: float) -> dict[str, Any]:
    """What goes into the JSON."""
    feasibility = result.feasibility
    return {
        "losses": result.losses,
        "valid_perplexity": perplexity,
        "seconds_per_step": result.step_seconds,
        "bytes_per_step": costs.measured_bytes(job),
        "peak_memory_bytes": costs.measured_memory(job),
        "feasibility": feasibility
        and {"weight": feasibility.weight, "mapped": feasibility.mapped},
        "max_parameter_difference": None,
    }
