"""Named roles in processes of their own, and how they call each other.

``launch`` checks and packs roles (``pack``, ``edited``); ``group`` starts their
processes (``forking``), watches over them (``watch``) and ends them: it is there that a
killed worker is noticed. ``process`` runs in each worker. ``others`` watches over those
of torchrun on other hosts. ``on_actors`` has the driver of Ray and Monarch, ``actor``
what runs in their workers. The rest is the seam: ``reference``, ``network``,
``gradients``, ``rendezvous``, and what attaches from outside.
"""

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
