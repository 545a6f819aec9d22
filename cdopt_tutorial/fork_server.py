"""Imported by the fork server alone, and first: what it does before all else.

It moves into a network of its own, in which its workers start, while it has no threads
yet. It has them compute with one thread unless a role asks for more:
``torch.set_num_threads`` affects only the thread that calls it, and each call from
another worker is answered in a new one. And it ends at once with its parent, whose
folder it removes: a stopped worker ends only with the server, which Python would take
seconds to end.
"""

import atexit
import os
import shutil
import signal

from cdopt_tutorial import own_network, scratch

if os.environ.get(own_network.VARIABLE) != "host" and own_network.is_allowed():
    own_network.enter()
os.environ["OMP_NUM_THREADS"] = "1"
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # noqa: E402 (has threads)

_prctl_pr_set_pdeathsig(signal.SIGCONT)  # or a stopped server would remain
atexit.register(os._exit, 0)
if folder := os.environ.pop(scratch.VARIABLE, None):
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # runs first
