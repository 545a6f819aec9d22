"""Who can reach a run: nobody but its own workers, where the kernel allows that."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hosts import PATIENCE, hosts, lack
from running import NOT_ROOT, listeners

from cdopt_tutorial import own_network
from cdopt_tutorial.own_network import VARIABLE

TESTS = Path(__file__).parent
WARNING = "workers share this machine's network: see the page 'Who can reach a run'"


def listeners_below(pid):
    """Ports and names on which the processes of a process's fork server listen."""
    below = psutil.Process(pid).children(recursive=True)
    found = [listeners(each.pid) for each in below if each.ppid() != pid]
    ports = sorted({port for ports, _ in found for _, port in ports})
    return ports, sorted(name for _, names in found for name in names)


@pytest.fixture(scope="module")
def machine():
    """How to run a command on a host of its own, where no other test listens."""
    if os.geteuid() != 0 or not own_network.is_allowed():
        lack("only root can make a host, where there are namespaces")
    with hosts(1) as made:
        yield "ip", "netns", "exec", made.names[0]


# Two workers of a process group; each of two runs goes on once it is told to.
RUNS = """
import roles, sys
from pathlib import Path
from cdopt_tutorial.run import Role, launch

def note(*record):
    waiting.append(record)
    if len(waiting) == 2:
        print("under way", flush=True)
        sys.stdin.readline()
        go.touch()

for polling in False, True:
    go, waiting = Path(sys.argv[1], f"{polling}"), []
    system = {f"{rank}": Role(roles.meet_and_wait, (rank, go)) for rank in range(2)}
    launch(system, polling=polling, on_report=note)
"""
# Prints those of the sockets in its argument that can be connected to.
CALL = """
import json, socket, sys
def accepts(family, address):
    with socket.socket(family) as caller:
        address = tuple(address) if family == socket.AF_INET else address
        return caller.connect_ex(address) == 0
print(json.dumps([each for each in json.loads(sys.argv[1]) if accepts(*each)]))
"""


def start(machine, folder, **env):
    """Start both runs on a machine."""
    command = [*machine, sys.executable, "-c", RUNS, folder]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = os.environ | env
    return subprocess.Popen(command, cwd=TESTS, env=env, text=True, **pipes)


def called(process, machine):
    """Where its run listens, by TCP and by Unix sockets; and what can be reached."""
    assert process.stdout.readline() == "under way\n", process.communicate()[1]
    ports, names = listeners_below(process.pid)
    sockets = [[socket.AF_INET, ["127.0.0.1", port]] for port in ports]
    sockets += [[socket.AF_UNIX, f"\0{name}"] for name in names]
    command = [*machine, sys.executable, "-c", CALL, json.dumps(sockets)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sockets[: len(ports)], names, json.loads(done.stdout)


@pytest.mark.xdist_group("network")
@pytest.mark.parametrize("how", [(), NOT_ROOT], ids=["root", "not root"])
def test_nobody_else_reaches_a_run(machine, how, tmp_path):
    with start([*machine, *how], tmp_path) as process:
        for polling in False, True:
            ports, names, reached = called(process, machine)
            assert len(ports) >= 4  # of RPC and of gloo, every worker's
            assert bool(names) == polling
            assert reached == []
            process.stdin.write("go on\n")
            process.stdin.flush()
        assert process.communicate(timeout=PATIENCE) == ("", "")


@pytest.mark.xdist_group("network")
def test_in_the_machines_network_everybody_reaches_it(machine, tmp_path):
    """The control: without a network of its own."""
    with start(machine, tmp_path, **{VARIABLE: "host"}) as process:
        ports, _, reached = called(process, machine)
        assert reached == ports
        process.kill()


TWICE = """
from running import preload_little
from cdopt_tutorial.run import Role, launch, serve
preload_little()
for _ in range(2):
    launch({"a": Role(serve), "b": Role(serve)})
"""


@pytest.mark.skipif(
    subprocess.call(["unshare", "--user", "true"], stderr=subprocess.DEVNULL) != 0,
    reason="the kernel refuses user namespaces",
)
def test_where_the_kernel_refuses_it_that_is_said_once_unless_it_was_chosen():
    # By a limit of 0 on network namespaces.
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh"]
    command += [sys.executable, "-c", TWICE]
    for wish, said in ("", f"{WARNING}\n"), ("host", ""):
        how = {"env": os.environ | {VARIABLE: wish}, "timeout": PATIENCE}
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, **how)
        assert (done.returncode, done.stderr) == (0, said)
