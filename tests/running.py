"""A command under way, to be disturbed by a test."""

import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

COMMAND = [sys.executable, "-m", "cdopt_tutorial.cli"]


def runs(process: psutil.Process) -> bool:
    """Whether it still runs: an orphan, once dead, is for the system to reap."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for_end(processes: list[psutil.Process], seconds: float = 10) -> None:
    """They must end within so many seconds."""
    limit = time.monotonic() + seconds
    while left := [process for process in processes if runs(process)]:
        assert time.monotonic() < limit, left
        time.sleep(0.1)


class Running:
    """A run of ``cdopt-tutorial`` that has begun to train.

    Args:
        args: of the command.
        sign: what its output says once it trains.
    """

    def __init__(self, args: list[str], sign: str):
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell that started the tests in the background has it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        while sign not in self.process.stdout.readline():
            assert self.process.poll() is None
        self.below = psutil.Process(self.process.pid).children(recursive=True)

    def kill_worker(self, rank: int) -> str:
        """What the command says to it; it must end within 10 s, and all below it."""
        # The fork server's children, in the order of their ranks.
        workers = [c for c in self.below if c.ppid() != self.process.pid]
        sorted(workers, key=lambda c: c.pid)[rank].kill()
        return self._end(1)

    def send_signal(self, number: signal.Signals, code: int) -> str:
        """The same for a signal to the command itself, which must give this code."""
        self.process.send_signal(number)
        return self._end(code)

    def _end(self, code: int) -> str:
        _, error = self.process.communicate(timeout=10)
        assert self.process.returncode == code
        wait_for_end(self.below)
        return error
