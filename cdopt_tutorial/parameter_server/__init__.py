"""Chapters 2 and 4: an RNN split over a trainer and a parameter server."""

from cdopt_tutorial.parameter_server import (
    checkpoint,
    compare,
    restart,
    sample,
    traffic,
)
from cdopt_tutorial.parameter_server.model import (
    History,
    Progress,
    RNNConfig,
    build_all,
)
from cdopt_tutorial.parameter_server.system import (
    Job,
    Owner,
    Trainer,
    check,
    run,
    run_locally,
)

__all__ = [
    "History", "Job", "Owner", "Progress", "RNNConfig", "Trainer",
    "build_all", "check", "checkpoint", "compare", "restart", "run", "run_locally",
    "sample", "traffic",
]  # fmt: skip
