"""Named roles in processes of their own, and how they call each other.

The ``run`` of a system takes an engine, from ``torch_rpc`` or ``on_ray``; its
``run_locally`` takes that of ``one_process``. They stand on rooms, from the top down:
``actors``, ``launcher`` (which notices a killed worker), ``torchrun``, ``seam``,
``watch``, ``probes``.
"""

from cdopt_tutorial.engines.launcher import process_group
from cdopt_tutorial.engines.launcher.launch import Role, launch
from cdopt_tutorial.engines.launcher.process import meeting, report, serve
from cdopt_tutorial.engines.launcher.share import share
from cdopt_tutorial.engines.probes.trace import Trace, span
from cdopt_tutorial.engines.probes.wire import Wire
from cdopt_tutorial.engines.watch.errors import WorkerError
from cdopt_tutorial.engines.watch.pace import passed
