"""A command under way, to be disturbed by a test."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from multiprocessing import forkserver
from pathlib import Path

import psutil
from hosts import still_running

COMMAND = [sys.executable, "-m", "cdopt_tutorial"]
NOT_ROOT = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]


def wait_for_end(processes: Iterable[psutil.Process]) -> None:
    assert not (still := still_running(processes)), still


@contextmanager
def endless(engine: str, folder: Path, *before: str):
    """A run that would take hours, once it trains, and the processes below it."""
    command = [*before, *COMMAND, "reinforce", "--lr=1e-9", "--max-episodes=10000000"]
    with subprocess.Popen(
        [*command, "--engine", engine], env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        while "Episode" not in running.stdout.readline():
            assert running.poll() is None
        yield running, psutil.Process(running.pid).children(recursive=True)


def preload_little() -> None:
    """Have this process's fork server import only what every worker needs."""
    from cdopt_tutorial.run import forking

    forking.PRELOAD = forking.PRELOAD[0], forking.PRELOAD[-1]


def end_server() -> None:
    """End this process's fork server; the next run starts a new one."""
    pid = forkserver._forkserver._forkserver_pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # until that can be seen


LISTENS, ACCEPTS = "0A", "00010000"  # states of a socket in /proc/net


def listeners(pid: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Where a process listens: addresses and ports, and names of Unix sockets.

    psutil would look for them in the network of this process, not of that one.
    """
    held, ports = set(), []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            held.add(os.readlink(descriptor))
    for line in _table(pid, "tcp") + _table(pid, "tcp6"):
        _, local, _, state, _, _, _, _, _, inode, *_ = line
        if state == LISTENS and f"socket:[{inode}]" in held:
            address, port = local.split(":")
            ports.append((_address(address), int(port, 16)))
    names = [
        path[0][1:]
        for _, _, _, flags, _, _, inode, *path in _table(pid, "unix")
        if flags == ACCEPTS and f"socket:[{inode}]" in held
        and path and path[0].startswith("@")
    ]  # fmt: skip
    return ports, names


def _table(pid: int, kind: str) -> list[list[str]]:
    lines = Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    return [line.split() for line in lines[1:]]


def _address(text: str) -> str:
    """In the usual notation; the kernel's tables have reversed words of four bytes."""
    whole = bytes.fromhex(text)
    words = [whole[start : start + 4][::-1] for start in range(0, len(whole), 4)]
    return str(ip_address(b"".join(words)))


LONG = 3600  # seconds; no test may wait that long, see `limited` and PATIENCE


class Script(subprocess.Popen):
    """Code in a process that leads a group, as a kernel does.

    Its temporary files have a folder of their own.
    """

    def __init__(self, code, place):
        super().__init__(
            [sys.executable, "-uc", code], env=os.environ | {"TMPDIR": str(place)},
            cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, sign):
        while sign not in (line := self.stdout.readline()):
            assert line, self.communicate()[1]

    def below(self):
        return psutil.Process(self.pid).children(recursive=True)

    def named(self):
        """Those below by their names, as far as they are still there."""
        found = {}
        for each in self.below():
            with suppress(psutil.NoSuchProcess):
                found[each.name()] = each
        return found
