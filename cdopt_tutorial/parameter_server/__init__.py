"""Chapters 2 and 4: an RNN split over a trainer and a parameter server."""

from cdopt_tutorial.parameter_server import checkpoint, compare, sample, start, traffic
from cdopt_tutorial.parameter_server.config import RNNConfig
from cdopt_tutorial.parameter_server.model import (
    Decoder,
    EmbeddingTable,
    RNNModel,
    constrain,
)
from cdopt_tutorial.parameter_server.server import ParameterServer
from cdopt_tutorial.parameter_server.steps import DistributedStep
from cdopt_tutorial.parameter_server.training import (
    History,
    Job,
    Progress,
    check,
    run,
    run_locally,
)

__all__ = [
    "Decoder",
    "DistributedStep",
    "EmbeddingTable",
    "History",
    "Job",
    "ParameterServer",
    "Progress",
    "RNNConfig",
    "RNNModel",
    "check",
    "checkpoint",
    "compare",
    "constrain",
    "run",
    "run_locally",
    "sample",
    "start",
    "traffic",
]
