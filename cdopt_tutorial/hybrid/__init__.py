"""Chapter 5: a table on a parameter server by RPC, a dense layer replicated by DDP."""

from cdopt_tutorial.hybrid.model import History, HybridConfig, Job, Progress, Result
from cdopt_tutorial.hybrid.system import check, run, run_locally

__all__ = [
    "History", "HybridConfig", "Job", "Progress", "Result", "check", "run",
    "run_locally",
]  # fmt: skip
