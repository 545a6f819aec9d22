"""Chapter 6: a transformer in shards and stages, free or constrained."""

from cdopt_tutorial.sharding import costs, vectors
from cdopt_tutorial.sharding.costs import owned
from cdopt_tutorial.sharding.model import MAX_VOCAB, Job, ShardConfig, transformer
from cdopt_tutorial.sharding.system import Result, perplexity, run, run_locally
