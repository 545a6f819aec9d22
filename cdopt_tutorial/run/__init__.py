"""Named roles in processes of their own: on this host, under torchrun, on Ray.

``group`` notices a worker that was killed, stopped or hangs; ``calls`` says how workers
reach each other's objects.
"""

from cdopt_tutorial.calls.errors import WorkerError
from cdopt_tutorial.probes.trace import Trace, span
from cdopt_tutorial.probes.wire import Wire
from cdopt_tutorial.run import process_group
from cdopt_tutorial.run.launch import Role, launch
from cdopt_tutorial.run.share import share
from cdopt_tutorial.run.worker import report, serve
