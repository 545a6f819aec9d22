"""Named roles in processes of their own, joined by ``torch.distributed.rpc``."""

from cdopt_tutorial.engines.errors import WorkerError
from cdopt_tutorial.engines.launch import Role, launch
from cdopt_tutorial.engines.pace import passed
from cdopt_tutorial.engines.process import meeting, report, serve
from cdopt_tutorial.engines.share import share
from cdopt_tutorial.engines.trace import Trace, span
from cdopt_tutorial.engines.wire import Wire, bytes_per_step

__all__ = [
    "Role", "Trace", "Wire", "WorkerError", "bytes_per_step", "launch", "meeting",
    "passed", "report", "serve", "share", "span",
]  # fmt: skip
