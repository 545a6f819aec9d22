"""Start processes: they are forked from a server that has imported torch.

The server is ``multiprocessing``'s own. A Ctrl-C or a kernel's interrupt reaches
neither it nor the workers, and it lives in a network of its own (``fork_server``).
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker

from cdopt_tutorial import scratch

# Imported once for all workers, but for our own systems, which a reader may edit.
PRELOAD = (
    "cdopt_tutorial.fork_server",  # first: it needs a process without threads
    "torch.distributed.rpc",
    "torch.distributed.optim",
    "torch._dynamo",  # which takes a second, and an optimizer imports it
    "gymnasium.envs.classic_control",
    "cdopt.nn",
    "cloudpickle",
    "cdopt_tutorial.run.worker",
)
Process = multiprocessing.get_context("forkserver").Process
# In the network of this process, for what must reach other machines.
OutsideProcess = multiprocessing.get_context("spawn").Process
_starting = threading.Lock()  # several threads may launch


@contextmanager
def server() -> Iterator[None]:
    """Meanwhile there is a server, and this process may start others.

    They ignore Ctrl-C and a kernel's interrupt, and do not rerun this one's script.
    """
    config = vars(multiprocessing.current_process())["_config"]
    main = vars(sys.modules["__main__"])
    with _starting:
        forkserver.set_forkserver_preload(list(PRELOAD))
        resource_tracker.ensure_running()  # which would unblock the signal again
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ[scratch.VARIABLE] = scratch.folder()
        tempdir, spec = config.get("tempdir"), main.get("__spec__")  # pdb's has none
        config["tempdir"] = scratch.short(scratch.folder())  # for the server's socket
        # The name of a program, which multiprocessing does not import.
        main["__spec__"] = ModuleSpec("program.__main__", None)
        try:
            forkserver.ensure_running()
            config["tempdir"] = tempdir  # since others would take over that path
            yield
        finally:
            main["__spec__"] = spec
            del os.environ[scratch.VARIABLE]
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _renew() -> None:
    """In a forked child, whose parent may have been starting something."""
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew)
