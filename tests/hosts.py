"""Hosts on one machine: network namespaces at a bridge, each with a name of its own.

Only root can make them; a test that needs them is skipped for anybody else.
"""

import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

PORT, RAY_PORT = 29500, 6379
PATIENCE = 300  # seconds for what hangs, on however busy a machine
NET = "10.213.0"  # of the bridge; nothing leads out of it


class Hosts:
    """A number of hosts, of which the first is torchrun's master."""

    def __init__(self, names: list[str], bridge: str):
        self.names, self._bridge = names, bridge
        self.started = list[subprocess.Popen[str]]()

    def cut(self, number: int) -> None:
        """Take a host off the bridge: packets are lost, and nobody notices."""
        ip("-n", self._bridge, "link", "set", f"port{number}", "nomaster")

    def start(
        self, number: int, *command: str, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on the host of that number, which is named host<n>."""
        inside = ["ip", "netns", "exec", self.names[number - 1], "unshare", "--uts"]
        inside += ["sh", "-c", f'hostname host{number} && exec "$@"', "sh"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
        process = subprocess.Popen([*inside, *command], text=True, **options)
        self.started.append(process)
        return process

    def torchrun(
        self,
        workers: list[int],
        *arguments: str,
        max_restarts: int = 0,
        module: str = "cdopt_tutorial",
        env: Iterable[dict[str, str]] = itertools.repeat({}),
    ) -> "Runs":
        """Run the package's command, or a module, with so many workers on each host."""
        common = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=1"]
        common += [f"--nnodes={len(workers)}", f"--max-restarts={max_restarts}"]
        common += [f"--master-addr={NET}.1", f"--master-port={PORT}"]
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        runs = []
        for rank, (number, own) in enumerate(zip(workers, env, strict=False)):
            command = [*common, f"--node-rank={rank}", f"--nproc-per-node={number}"]
            command += ["-m", module, *arguments]
            runs.append(self.start(rank + 1, *command, env=environment | own))
        return Runs(runs)

    @contextmanager
    def cluster(self) -> Iterator[dict[str, str]]:
        """Ray on all hosts, for two workers on each; yields its clients' settings."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment = {**os.environ, **token, "RAY_USAGE_STATS_ENABLED": "0"}
        every = ["--num-cpus=2", "--object-store-memory=100000000", "--block"]
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
            first = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            first += [f"--temp-dir={folder}"]
            nodes: list[subprocess.Popen] = []
            try:
                for number in range(1, len(self.names) + 1):
                    own = first if number == 1 else [f"--address={NET}.1:{RAY_PORT}"]
                    own += [f"--node-ip-address={NET}.{number}", *every]
                    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *own]
                    nodes.append(self.start(number, *ray, env=environment))
                    # It prints this once all of it runs.
                    assert any("--block" in line for line in nodes[-1].stdout), number
                yield environment
            finally:
                # With SIGTERM they would wait for each other.
                kill(nodes)


class Runs:
    """One run on several hosts: torchrun on each, and what is below it."""

    def __init__(self, agents: list[subprocess.Popen]):
        self.agents = agents

    def ranks(self, host: int) -> list[psutil.Process]:
        """The processes that torchrun has started on a host, by their ranks."""
        return psutil.Process(self.agents[host - 1].pid).children()

    def wait_for(self, text: str) -> None:
        """Read what the first host prints, up to this text."""
        assert any(text in line for line in self.agents[0].stdout), self.end()

    def end(self) -> list[tuple[int, str]]:
        """Each host's exit code and output; nothing is left."""
        seen, ends = set(tree(self.agents)), []
        for agent in self.agents:
            output, _ = agent.communicate(timeout=PATIENCE)
            ends.append((agent.returncode, output))
        assert not (still := still_running(seen)), still
        return ends


def tree(processes: list[subprocess.Popen]) -> Iterator[psutil.Process]:
    """Those that still run, and all below them."""
    for process in processes:
        if process.poll() is not None:
            continue  # its id may be another's by now
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(process.pid)
            yield from (found, *found.children(recursive=True))


def kill(processes: list[subprocess.Popen]) -> None:
    """Kill them, and all below them."""
    for process in list(tree(processes)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def still_running(processes: Iterable[psutil.Process]) -> list:
    """Those of them that still run after a long while; at once if none does."""
    with suppress(AssertionError):
        wait_until(lambda: not any(map(runs, processes)))
    return [process for process in processes if runs(process)]


def runs(process: psutil.Process) -> bool:
    """Whether it still runs; a dead orphan is left for the system to reap."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def ip(*arguments: str) -> None:
    """Configure the network."""
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def hosts(number: int) -> Iterator[Hosts]:
    """So many hosts; where none can be made the test is skipped, but not in CI."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        lack("root and Debian's iproute2 are needed to make hosts")
    bridge = f"cdopt{os.getpid()}-bridge"
    names = [f"cdopt{os.getpid()}-h{i}" for i in range(1, number + 1)]
    with ExitStack() as end:
        for name in (bridge, *names):
            ip("netns", "add", name)
            end.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", bridge, "link", "set", "br0", "up")
        for i, name in enumerate(names, start=1):
            peer = ["peer", "name", "eth0", "netns", name]
            ip("-n", bridge, "link", "add", f"port{i}", "type", "veth", *peer)
            ip("-n", bridge, "link", "set", f"port{i}", "master", "br0", "up")
            ip("-n", name, "address", "add", f"{NET}.{i}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        made = Hosts(names, bridge)
        end.callback(kill, made.started)
        yield made


def lack(why: str) -> None:
    """Skip a test for want of something; in CI it fails."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)


def wait_until(condition: Callable[[], bool]) -> None:
    """The condition must hold in the end."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)
