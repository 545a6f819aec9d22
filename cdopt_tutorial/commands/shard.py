"""`cdopt-tutorial shard`: train a transformer in copies, shards, parts or stages."""

from functools import partial
from typing import Any

from cdopt_tutorial import sharding
from cdopt_tutorial.commands.training import ComparedFlags as Flags
from cdopt_tutorial.commands.training import check_finite, difference
from cdopt_tutorial.sharding import ShardConfig as Config
from cdopt_tutorial.sharding import costs

SMOKE = {"max_steps": 10, "width": 16, "seq_len": 8}


def prepare(config: Config, flags: Flags) -> sharding.Job:
    """The job, on chapter 2's text."""
    job = sharding.Job(config)
    sharding.check(job)
    return job


def train(job: sharding.Job, flags: Flags, **options: Any) -> dict[str, Any]:
    """Train, measure on this host, and compare; losses are in nats."""
    result = sharding.run(job, **options)
    check_finite(result.losses[-1])
    perplexity = sharding.perplexity(job, result.weights)
    check_finite(perplexity)
    norms = result.feasibility
    return {
        "losses": result.losses,
        "valid_perplexity": perplexity,
        "seconds_per_step": result.step_seconds,
        "bytes_per_step": costs.measured_bytes(job),
        "peak_memory_bytes": costs.measured_memory(job),
        "transport": result.ranks[0].transport,
        "feasibility": norms and {"weight": norms.weight, "mapped": norms.mapped},
        **difference(
            flags.against_local, result.weights, partial(sharding.run_locally, job)
        ),
    }
