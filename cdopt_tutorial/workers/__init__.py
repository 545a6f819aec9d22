"""Named roles in processes of their own, joined by ``torch.distributed.rpc``."""

from cdopt_tutorial.workers.errors import WorkerError
from cdopt_tutorial.workers.launch import Role, launch
from cdopt_tutorial.workers.process import meeting, passed, report, serve
from cdopt_tutorial.workers.share import share
from cdopt_tutorial.workers.trace import Trace, span
from cdopt_tutorial.workers.wire import Wire, bytes_per_step

__all__ = [
    "Role",
    "Trace",
    "Wire",
    "WorkerError",
    "bytes_per_step",
    "launch",
    "meeting",
    "passed",
    "report",
    "serve",
    "share",
    "span",
]
