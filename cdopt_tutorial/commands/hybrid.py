"""`cdopt-tutorial hybrid`: train a table by RPC, and replicas of a layer by DDP."""

from functools import partial

from cdopt_tutorial import hybrid
from cdopt_tutorial.commands import training


def run(arguments: list[str]) -> int:
    """Train on the digits, and test."""
    config, flags, options = training.read(
        "hybrid", hybrid.HybridConfig, training.Flags, arguments, max_steps=30
    )
    if flags.against_local and config.semantics == "original":
        raise ValueError("semantics original has no equal in one process")
    job = hybrid.Job(config)
    result = hybrid.run(job, on_report=training.log, **options)
    repeat = partial(hybrid.run_locally, job)
    return training.finish(flags, result.figures(), result.weights, repeat)
