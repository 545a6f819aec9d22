"""`cdopt-tutorial shard`: train a transformer in copies, shards, parts or stages."""

import argparse
import math
from functools import partial

from cdopt_tutorial import sharding
from cdopt_tutorial.commands import common, training
from cdopt_tutorial.sharding import costs

SMOKE = {"max_steps": 10, "width": 16, "seq_len": 8}
add = partial(training.add_flags, config=sharding.ShardConfig)


def run(args: argparse.Namespace) -> None:
    """Train, measure, compare, and write: losses in nats, null where there is none."""
    with common.bad_input():
        job = sharding.Job(training.read_config(args, sharding.ShardConfig, SMOKE))
        sharding.check(job)
        on = training.read_engine(args)
    result = sharding.run(job, on=on, deadline=math.inf)
    training.check_finite(result.losses[-1])
    perplexity = sharding.perplexity(job, result.weights)
    training.check_finite(perplexity)
    norms = result.feasibility
    found = {
        "losses": result.losses,
        "valid_perplexity": perplexity,
        "seconds_per_step": result.step_seconds,
        "bytes_per_step": costs.measured_bytes(job),
        "peak_memory_bytes": costs.measured_memory(job),
        "feasibility": norms and {"weight": norms.weight, "mapped": norms.mapped},
        "max_parameter_difference": training.difference(
            args.against_local, result.weights, partial(sharding.run_locally, job)
        ),
    }
    common.write_json(args.json, found)
    print(
        f"validation perplexity {perplexity:.1f}; a step takes "
        f"{result.step_seconds * 1e3:.1f} ms and {found['bytes_per_step']:,.0f} "
        f"bytes, {found['peak_memory_bytes']:,} bytes of memory on a rank "
        f"({result.ranks[0].transport})"
    )
