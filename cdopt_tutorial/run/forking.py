"""Start processes: they are forked from a server that has imported torch.

The server is ``multiprocessing``'s own. A Ctrl-C or a kernel's interrupt reaches
neither it nor the workers, and it lives in a network of its own (``fork_server``).
"""

import functools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.process import BaseProcess
from typing import Any

from cdopt_tutorial import own_network, scratch

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
_started_with: Any = None  # what the server had from this process
_starting = threading.Lock()  # several threads may launch


class _Popen(popen_forkserver.Popen):
    """Has the server start a process that does not rerun the parent's script."""

    def _launch(self, process: BaseProcess) -> None:
        context.set_spawning_popen(self)  # collects the pipes to pass on
        try:
            known = spawn.get_preparation_data(process.name)
            known = {k: known[k] for k in known if not k.startswith("init_main")}
            sent = [reduction.ForkingPickler.dumps(each) for each in (known, process)]
        finally:
            context.set_spawning_popen(None)
        self.sentinel, end = forkserver.connect_to_new_process(self._fds)
        ends = os.dup(end), self.sentinel  # the first shows the process that we live
        self.finalizer = util.Finalize(self, util.close_fds, ends)
        with open(end, "wb") as pipe:
            pipe.writelines(sent)
        self.pid = forkserver.read_signed(self.sentinel)


class Process(context.ForkServerProcess):
    """A process that the fork server starts."""

    _Popen = _Popen


def start(start_all: Callable[[], None]) -> None:
    """Start processes by this function, once there is a server like this process."""
    with _starting:
        _start(start_all)


def _start(start_all: Callable[[], None]) -> None:
    global _started_with
    like = _inherited()
    if like != _started_with:
        end_server()
    _started_with = like
    forkserver.set_forkserver_preload(list(PRELOAD))
    # A debugger's has none, but multiprocessing reads it.
    vars(sys.modules["__main__"]).setdefault("__spec__", None)
    resource_tracker.ensure_running()  # which would unblock the signal again
    # What this thread starts ignores Ctrl-C and a kernel's interrupt: we handle them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    config = multiprocessing.current_process()._config
    before = dict(config)
    config["tempdir"] = scratch.short(scratch.folder())
    os.environ[scratch.VARIABLE] = scratch.folder()
    config.pop("daemon", None)  # a Pool's workers may have none, but ours end with them
    try:
        forkserver.ensure_running()
        start_all()
    finally:
        del os.environ[scratch.VARIABLE]
        config.clear()
        config.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _inherited() -> Any:
    """What processes that the server starts inherit of it; variables they get anew."""
    mask = os.umask(0o077)
    os.umask(mask)
    kinds = (kind for kind in dir(resource) if kind.startswith("RLIMIT_"))
    limits = tuple(resource.getrlimit(getattr(resource, kind)) for kind in kinds)
    own = os.environ.get(own_network.VARIABLE)
    return os.sched_getaffinity(0), os.nice(0), mask, limits, own


def end_server() -> None:
    """End the fork server; the next run starts a new one."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # where SIGCHLD is ignored
            server._stop()
        server._forkserver_pid = None


def _forget() -> None:
    """In a forked child: the parent's server is not this process's."""
    global _starting
    _starting = threading.Lock()
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = None
    server._forkserver_pid = None


os.register_at_fork(after_in_child=_forget)


def check_network(pid: int) -> None:
    """Warn, once, if a worker is in the machine's network, and not by choice."""
    if os.environ.get(own_network.VARIABLE) == "host":
        return
    text = "workers share this machine's network: see the page 'Who can reach a run'"
    with suppress(OSError):  # it has ended, or we may not look
        if os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
            _warn_once(text)


_warn_once = functools.cache(warnings.warn)  # whatever the filters of warnings
