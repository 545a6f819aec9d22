"""What is left of many runs that succeed, fail and are stopped at any moment."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import start_new_kernel

from cdopt_tutorial.engines import Role, WorkerError, launch, serve
from cdopt_tutorial.scratch import PREFIX

COMMANDS = "reinforce --lr 1e-9", "rnn", "hybrid", "shard"
COMMANDS += "execute --force", "build"
STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SECONDS = 8.0  # of a command, or of two launches, within which it is stopped
GONE = 300.0  # seconds after which nothing of a stopped run may be left

_stops = cycle(product(STOPS, COMMANDS))  # the next one at each later moment

CELLS = (
    "from cdopt_tutorial.engines import Role, launch, serve",
    'launch({"a": Role(serve), "b": Role(serve)})',  # interrupted
    'launch({"a": Role(serve), "b": Role(serve)})',
)


def disturbed(smoke: bool) -> Iterator[dict[str, Any]]:
    """Disturb runs 50 times in each way, or twice, and count what each leaves."""
    times = 2 if smoke else 50
    launch({"worker": Role(serve)})  # the fork server stays
    for what, disturb in WAYS.items():
        for number in range(times):
            wrong = disturb((number + 0.5) / times)
            yield {"what": what, "wrong": wrong, **_left()}


def _left() -> dict[str, float]:
    """What there is of this process and below it, and of anybody's folders."""
    own = psutil.Process()
    return {
        "memory in MB": own.memory_info().rss / 2**20,
        "open files": own.num_fds(), "threads": own.num_threads(),
        "processes below": len(own.children(recursive=True)),
        "folders": len(list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))),
    }  # fmt: skip


def _launch(function: Callable, expected: str) -> Callable[[float], str]:
    def disturb(_: float) -> str:
        try:
            launch({"worker": Role(function), "other": Role(serve)})
        except WorkerError as error:
            return "" if error.headline == expected else error.headline
        return "" if not expected else "it succeeded"

    return disturb


def _stopped_command(moment: float) -> str:
    """Stop the next command by a signal: one line, its code, nothing left."""
    stop, command = next(_stops)
    arguments = [sys.executable, "-m", "cdopt_tutorial", *command.split()]
    # Not before Python runs our code, after a tenth of a second.
    stop_at = time.monotonic() + 0.15 + moment * SECONDS
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, preexec_fn=_hear_all, **pipes) as process:
        time.sleep(max(0.0, stop_at - time.monotonic()))
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(stop)
        error = process.communicate()[1]
    left = psutil.wait_procs(below, GONE)[1]
    said = re.fullmatch(r"cdopt-tutorial: [\w ]+\n", error)
    if said and process.returncode == STOPS[stop] and not left:
        return ""
    return f"{command} {stop.name}: {process.returncode}, left {left}, said {error}"


def _hear_all() -> None:
    """Heed all signals: a shell has its background processes ignore some."""
    for stop in STOPS:
        signal.signal(stop, signal.SIG_DFL)


def _interrupted_kernel(moment: float) -> str:
    """Interrupt a kernel in its first launch; the next launch must succeed."""
    manager, client = start_new_kernel(stderr=subprocess.DEVNULL)
    try:
        for cell in CELLS:
            timer = threading.Timer(moment * SECONDS / 2, manager.interrupt_kernel)
            if cell is CELLS[1]:
                timer.start()
            how = {"output_hook": lambda _: None, "timeout": GONE}
            reply = client.execute_interactive(cell, **how)
            timer.cancel()
        return reply["content"].get("evalue", "")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _fails() -> None:
    raise ValueError("as it should")


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WAYS = {
    "a launch that succeeds": _launch(serve, ""),
    "a worker that raises": _launch(_fails, "worker raised ValueError"),
    "a worker that is killed": _launch(_dies, "worker was killed by SIGKILL"),
    "a stopped command": _stopped_command,
    "an interrupted kernel": _interrupted_kernel,
}
