"""Chapter 5: a table on a parameter server by RPC, a dense layer replicated by DDP."""

from cdopt_tutorial.hybrid.config import HybridConfig
from cdopt_tutorial.hybrid.history import History, Progress, Result
from cdopt_tutorial.hybrid.model import HybridModel, Table, dense_layer
from cdopt_tutorial.hybrid.training import Job, make, run, run_locally

__all__ = [
    "History",
    "HybridConfig",
    "HybridModel",
    "Job",
    "Progress",
    "Result",
    "Table",
    "dense_layer",
    "make",
    "run",
    "run_locally",
]
