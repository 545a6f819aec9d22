"""Chapter 6: a transformer in shards and stages, free or constrained."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cdopt_tutorial.sharding.model import MAX_VOCAB, Job, ShardConfig, transformer

if TYPE_CHECKING:
    from cdopt_tutorial.sharding import costs, vectors
    from cdopt_tutorial.sharding.costs import owned
    from cdopt_tutorial.sharding.system import Result, perplexity, run, run_locally


# Imported at their first use: torch's shards and pipelines take a second, in which
# the command's help would say nothing.
def __getattr__(name: str) -> Any:
    if name in ("costs", "vectors"):
        return import_module(f"{__name__}.{name}")
    module = "costs" if name == "owned" else "system"
    return getattr(import_module(f"{__name__}.{module}"), name)
