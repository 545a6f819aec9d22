"""Imported by the fork server alone, and first: what it does before all else.

It moves into a network of its own, in which its workers start, while it has no threads
yet. It ends at once with its parent, whose folder it removes.
"""

import atexit
import os
import shutil
import signal
import sys

from cdopt_tutorial import own_network, scratch

signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a supervisor's programs may ignore it
if os.environ.get(own_network.VARIABLE) != "host":
    if own_network.is_allowed():
        own_network.enter()
    else:
        shared = (
            "workers share this machine's network: see the page 'Who can reach a run'"
        )
        print(shared, file=sys.stderr)
os.environ["OMP_NUM_THREADS"] = "1"  # read as torch is imported
from torch.multiprocessing.spawn import _prctl_pr_set_pdeathsig  # noqa: E402 (threads)

_prctl_pr_set_pdeathsig(signal.SIGCONT)  # or a stopped server would remain
atexit.register(os._exit, 0)


def _remove(folder: str) -> None:
    if not hasattr(sys, "last_value"):  # else an import has failed: the parent lives
        shutil.rmtree(folder, ignore_errors=True)


if folder := os.environ.pop(scratch.VARIABLE, None):
    atexit.register(_remove, folder)  # runs first
