"""Named roles in processes of their own, joined by ``torch.distributed.rpc``."""

from cdopt_tutorial.engines.errors import WorkerError as WorkerError
from cdopt_tutorial.engines.launch import Role as Role
from cdopt_tutorial.engines.launch import launch as launch
from cdopt_tutorial.engines.pace import passed as passed
from cdopt_tutorial.engines.process import meeting as meeting
from cdopt_tutorial.engines.process import report as report
from cdopt_tutorial.engines.process import serve as serve
from cdopt_tutorial.engines.share import share as share
from cdopt_tutorial.engines.trace import Trace as Trace
from cdopt_tutorial.engines.trace import span as span
from cdopt_tutorial.engines.wire import Wire as Wire
from cdopt_tutorial.engines.wire import bytes_per_step as bytes_per_step
