"""Who can reach a run: nobody but its own workers, where the kernel allows that."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from hosts import PATIENCE, hosts, lack
from running import Talk, listeners

from cdopt_tutorial import own_network
from cdopt_tutorial.own_network import VARIABLE

TESTS = Path(__file__).parent
WARNING = "workers share this machine's network: see the page 'Who can reach a run'"
needs_user_namespaces = pytest.mark.skipif(
    subprocess.call(["unshare", "--user", "true"], stderr=subprocess.DEVNULL) != 0,
    reason="the kernel refuses user namespaces",
)


def listeners_below(talk):
    """Ports and names on which the processes of its fork server listen."""
    below = psutil.Process(talk.pid).children(recursive=True)
    found = [listeners(each.pid) for each in below if each.ppid() != talk.pid]
    ports = sorted({port for ports, _ in found for _, port in ports})
    return ports, sorted(name for _, names in found for name in names)


@pytest.fixture(scope="module")
def mark():
    """A folder in which any user may leave a mark."""
    with TemporaryDirectory() as folder:  # pytest's own is closed
        os.chmod(folder, 0o777)
        yield Path(folder)


@pytest.fixture(scope="module")
def machine():
    """How to run a command on a host of their own: other tests' runs are no prey."""
    if os.geteuid() != 0 or not own_network.is_allowed():
        lack("only root can become another user, where there are namespaces")
    with hosts(1) as made:
        yield "ip", "netns", "exec", made.names[0]


@pytest.fixture(scope="module")
def intruder(mark, machine):
    with Talk("attack.py", mark, within=machine) as intruder:
        yield intruder


def attacked(victim, intruder, polling):
    """Where the run listens: ports and names; and which of them were reached."""
    victim.tell(polling)
    assert victim.hear() == "under way"
    ports, names = listeners_below(victim)
    intruder.tell((ports, names))
    reached = intruder.hear()
    victim.tell("go on")
    return ports, names, reached


@pytest.mark.xdist_group("network")
def test_nobody_else_reaches_a_run(intruder, machine, mark, tmp_path):
    with Talk("victim.py", tmp_path, within=machine) as victim:
        for polling in False, True:
            ports, names, reached = attacked(victim, intruder, polling)
            assert len(ports) >= 4  # of RPC and of gloo, every worker's
            assert bool(names) == polling
            assert reached == []
            assert victim.hear() == "ended"
        assert not list(mark.iterdir())
        victim.stdin.close()
        assert victim.stderr.read() == ""


@pytest.mark.xdist_group("network")
def test_in_the_machines_network_anybody_is_root(intruder, machine, mark, tmp_path):
    """The control: without a network of its own, the same attack succeeds."""
    chosen = {VARIABLE: "host"}
    with Talk("victim.py", tmp_path, within=machine, **chosen) as victim:
        ports, _, reached = attacked(victim, intruder, False)
        assert reached == ports
        assert "0\n" in {file.read_text() for file in mark.iterdir()}
        assert "was killed by SIGABRT" in victim.stderr.read()


LAUNCH = """
from running import end_server, preload_little
preload_little()
from cdopt_tutorial.run import Role, launch, serve
run = lambda: launch({"a": Role(serve), "b": Role(serve)})
"""
# In one process: in the machine's network by choice, then twice not by choice.
TWICE = """
import os, sys
from cdopt_tutorial.own_network import VARIABLE
os.environ[VARIABLE] = "host"
run()
print("chosen", file=sys.stderr)
del os.environ[VARIABLE]
end_server()
run()
run()
"""


def in_user_namespace(script, *options):
    """What a script prints, in a user namespace made with these options."""
    command = ["unshare", "--user", *options, sys.executable, "-c", LAUNCH + script]
    pipes = {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=TESTS, timeout=PATIENCE, **pipes)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@needs_user_namespaces
def test_where_the_kernel_refuses_it_that_is_said_once_unless_it_was_chosen():
    # By a limit of 0 on network namespaces.
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    within = "--map-root-user", "sh", "-c", shell, "sh"
    chosen, refused = in_user_namespace(TWICE, *within)[1].split("chosen\n")
    assert chosen == ""
    assert refused.count(WARNING) == 1


@needs_user_namespaces
def test_who_is_not_root_has_a_network_of_his_own_too():
    somebody = "--map-user=1000", "--map-group=1000"
    script = "run()\nimport os; print(os.getuid())"
    assert in_user_namespace(script, *somebody) == ("1000\n", "")
