"""Start processes: they are forked from a server that no interrupt reaches."""

import functools
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
    "cdopt_tutorial.engines.launcher.process",
)

UNKNOWN = 255  # the exit code where the server can't say it
MOMENT = 0.3  # seconds in which a server that was killed has ended


class _Popen(popen_forkserver.Popen):
    """Has the server start a process that does not rerun the parent's script."""

    def _launch(self, process: BaseProcess) -> None:
        known = spawn.get_preparation_data(process.name)
        known = {key: known[key] for key in known if not key.startswith("init_main")}
        context.set_spawning_popen(self)  # collects the pipes to pass on
        try:
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


def start(start_all: Callable[[], None]) -> Future:
    """Start processes in a thread of its own, which a stopped server blocks forever.

    In the main thread an interrupt could leave a start half done.
    """
    forkserver.set_forkserver_preload(list(PRELOAD))
    thread = ThreadPoolExecutor(1)
    starting = thread.submit(_start, start_all)
    thread.shutdown(wait=False)
    return starting


def _start(start_all: Callable[[], None]) -> None:
    resource_tracker.ensure_running()  # which would unblock the signal again
    # What this thread starts ignores Ctrl-C and a kernel's interrupt: we handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # The server makes its socket in this folder, and removes it should we be killed.
    folder = scratch.of_process(os.getpid())
    config = multiprocessing.current_process()._config
    before = dict(config)
    config["tempdir"], os.environ[scratch.VARIABLE] = _short(folder), folder
    try:
        forkserver.ensure_running()
        start_all()  # starts the server again if it has been ended meanwhile
    finally:
        config.clear()
        config.update(before)
        del os.environ[scratch.VARIABLE]


@functools.cache
def _short(folder: str) -> str:
    """A path to the folder, in this process only, short enough for a socket."""
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def end_server() -> None:
    """End the fork server, even one that is stopped; the next run starts a new one."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def server_ends() -> bool:
    """Whether the fork server has ended by now, or within a moment."""
    time.sleep(MOMENT)
    seen = os.WEXITED | os.WNOHANG | os.WNOWAIT  # leave it to Python to reap
    return os.waitid(os.P_PID, forkserver._forkserver._forkserver_pid, seen) is not None


def check_network(pid: int) -> None:
    """Warn, once, if a worker is in the machine's network, and not by choice."""
    if os.environ.get(own_network.VARIABLE) == "host":
        return
    text = "workers share this machine's network: see the page 'Who can reach a run'"
    with suppress(OSError):  # it has ended, or we may not look
        if os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
            _warn_once(text)


_warn_once = functools.cache(warnings.warn)  # whatever the filters of warnings
