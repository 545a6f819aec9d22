"""`cdopt-tutorial shard`: train a transformer in copies, shards, parts or stages."""

from functools import partial

from cdopt_tutorial import sharding
from cdopt_tutorial.commands import training

SMOKE = {"max_steps": 10, "width": 16, "seq_len": 8}


def run(arguments: list[str]) -> int:
    """Train on chapter 2's text, and measure on this host; losses are in nats."""
    config, flags, options = training.read(
        "shard", sharding.ShardConfig, training.Flags, arguments, **SMOKE
    )
    job = sharding.Job(config)
    result = sharding.run(job, **options)
    perplexity = sharding.perplexity(job, result.weights)
    training.check_finite(perplexity)
    norms = result.feasibility
    figures = {
        "losses": result.losses,
        "valid_perplexity": perplexity,
        "seconds_per_step": result.step_seconds,
        "bytes_per_step": sharding.costs.measured_bytes(job),
        "peak_memory_bytes": sharding.costs.measured_memory(job),
        "transport": result.ranks[0].transport,
        "feasibility": norms and {"weight": norms.weight, "mapped": norms.mapped},
    }
    repeat = partial(sharding.run_locally, job)
    return training.finish(flags, figures, result.weights, repeat)
