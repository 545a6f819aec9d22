"""Chapter 5: a table on a parameter server by RPC, a dense layer replicated by DDP."""

from cdopt_tutorial.hybrid.model import History, HybridConfig, Job, Result
from cdopt_tutorial.hybrid.system import run, run_locally
