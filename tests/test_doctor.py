"""The doctor: what it says of a machine and of a peer, and its verdict."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import warnings
from types import SimpleNamespace

import pytest
import torch
from clumsy import pattern
from hosts import NET, PATIENCE, hosts
from running import COMMAND
from test_network import needs_user_namespaces

from cdopt_tutorial import checks, own_network
from cdopt_tutorial.cli import main
from cdopt_tutorial.commands import doctor, peer
from cdopt_tutorial.engines.torchrun import store

OWN_NAME = "... is ... here: give --master-addr an address"
NO_WAY_OUT = "none leads out of this host, so runs stay on it"
NO_RAY = "...; --engine ray needs pip install 'cdopt-tutorial[ray]'"
OLD_DRIVER = "torch can't use them: their driver does not fit this torch"
REFUSED = "workers share this host's: the kernel refuses them their own"
NO_WAY = ": choose the interface by CDOPT_TUTORIAL_INTERFACE, or open all TCP ports"
FEW_FILES = "4 workers need 352 open files each, but 99 are allowed here: ..."
TOO_LITTLE = "... are free, but 4 workers need 600 and 100 MB"
TIMES = "a call takes ... ms, an all-reduce of 16 kB ... ms"


@pytest.fixture
def examine(monkeypatch, tmp_path, capsys):
    """The command: its code, its verdict, and for each thing its level and a text."""
    monkeypatch.setattr(peer, "resolve", lambda name: "10.0.0.1")
    monkeypatch.setattr(store, "interface", lambda host: "eth0")
    monkeypatch.setattr(own_network, "is_allowed", lambda: True)
    monkeypatch.setattr(doctor, "find_spec", lambda name: True)
    monkeypatch.delenv(own_network.VARIABLE, raising=False)

    def run(*args):
        file = tmp_path / "found.json"
        code = main(["doctor", *args, "--json", str(file)])
        said, found = capsys.readouterr(), json.loads(file.read_text())
        assert found["works"] == (code == 0)
        last = said.err if code else said.out.splitlines()[-1] + "\n"
        assert last == f"{'cdopt-tutorial: ' * code}{found['verdict']}\n"
        for each in found["findings"]:
            assert "{level:<7} {about:<10}".format(**each) in said.out
        about = {e["about"]: (e["level"], e["text"]) for e in found["findings"]}
        return code, found["verdict"], about

    return run


def test_a_healthy_machine_gets_no_remark(examine):
    code, verdict, found = examine()
    assert (code, verdict) == (0, "runs on this host will work")
    assert [*found] == "name interface network machine versions GPUs".split()
    assert {level for level, _ in found.values()} == {"ok"}
    assert f"torch {torch.__version__}" in found["versions"][1]


def fail(*_):
    raise OSError("not here")


def warn(_):
    warnings.warn("old driver", stacklevel=1)
    return ()


BETTER = [
    ("name", peer, "resolve", lambda name: "127.0.1.1", OWN_NAME),
    ("interface", store, "interface", fail, NO_WAY_OUT),
    ("network", own_network, "is_allowed", lambda: False, REFUSED),
    ("versions", doctor, "find_spec", lambda name: None, NO_RAY),
    ("GPUs", doctor, "gpus_of", warn, OLD_DRIVER),
]


@pytest.mark.parametrize(("about", "where", "name", "value", "line"), BETTER)
def test_what_could_be_better_is_a_remark(
    about, where, name, value, line, examine, monkeypatch
):
    monkeypatch.setattr(where, name, value)
    code, verdict, found = examine()
    assert (code, found[about][0]) == (0, "remark")
    assert pattern(line).fullmatch(found[about][1])
    assert re.match(r"runs on this host will work, with remarks \(see book/", verdict)


def test_gpus_need_nccl(examine, monkeypatch):
    monkeypatch.setattr(doctor, "gpus_of", lambda device: ("cuda:0", "cuda:1"))
    lacks = "2, but this torch has no NCCL: workers use gloo"
    for has, text in (True, "2, with NCCL"), (False, lacks):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda has=has: has)
        assert examine()[2]["GPUs"] == ("ok" if has else "remark", text)


LOW = [
    (checks, "free_memory", lambda: 9 * checks.MB, TOO_LITTLE),
    (shutil, "disk_usage", lambda folder: SimpleNamespace(free=0), TOO_LITTLE),
    (resource, "getrlimit", lambda kind: (99, 99), FEW_FILES),
]


@pytest.mark.parametrize(("where", "name", "value", "line"), LOW)
def test_too_little_of_something_fails(examine, monkeypatch, where, name, value, line):
    monkeypatch.setattr(where, name, value)
    code, verdict, found = examine()
    assert (code, found["machine"][0]) == (1, "fails")
    assert pattern(line).fullmatch(found["machine"][1])
    assert verdict == "runs on this host will fail (see book/errors.md#the-doctor)"


def test_a_quota_of_memory_counts(examine, monkeypatch, tmp_path):
    quota = tmp_path / "memory.max"
    monkeypatch.setattr(doctor, "QUOTAS", [quota])
    for text, code in ("max", 0), (str(9 * checks.MB), 1):
        quota.write_text(text)
        assert examine()[0] == code


def test_a_port_that_another_program_has_fails(examine, monkeypatch):
    monkeypatch.setattr(peer, "resolve", lambda name: "127.0.0.1")
    monkeypatch.setattr(store, "interface", lambda host: "lo")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, found = examine("--peer", "there", "--port", str(port))
    assert (code, found["peer"][0]) == (1, "fails")
    say = "[Errno 98] Address already in use (while attempting to bind on"
    assert found["peer"][1].startswith(say)


def test_a_peer_with_other_versions_gets_a_remark(examine, monkeypatch):
    other = {"name": "host2", "versions": "torch 2.11"}
    monkeypatch.setattr(peer, "examine", lambda *_: (other, 0.5, 0.25))
    code, verdict, found = examine("--peer", "there")
    assert (code, found["peer"][0]) == (0, "remark")
    assert pattern(f"{TIMES}; but host2 has torch 2.11").fullmatch(found["peer"][1])
    assert verdict.startswith("runs with there will work, with remarks (see book/")


def test_a_name_that_leads_nowhere_in_time():
    with pytest.raises(ValueError, match="^x has no address: add it to /etc/hosts, or"):
        peer.resolve("x", seconds=0)


def test_its_pages_have_the_places_that_it_names(project):
    for page in doctor.HOSTS, doctor.NETWORK, doctor.MACHINE, doctor.SETUP, doctor.GPU:
        file, _, place = page.partition("#")
        assert f"({place})=" * bool(place) in (project.root / file).read_text()


@needs_user_namespaces
def test_where_the_kernel_refuses_a_namespace_that_is_said(monkeypatch):
    monkeypatch.delenv(own_network.VARIABLE, raising=False)
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    within = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh"]
    done = subprocess.run([*within, *COMMAND, "doctor"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"remark  network   {REFUSED}\n" in done.stdout


WIDE = os.environ | {"COLUMNS": "300"}
FIRST, SECOND, PATIENT = f"{NET}.1", f"{NET}.2", ("--wait", "60")


def consult(two, *doctors, **variables):
    """The code and the output of each host's doctor, the first with these variables."""
    started = []
    for number, args in enumerate(doctors, start=1):
        command = [*COMMAND, "doctor", "--peer", *args]
        started.append(two.start(number, *command, env=WIDE | variables))
        variables = {}
    told = [each.communicate(timeout=PATIENCE)[0] for each in started]
    verdict = re.compile(r"(cdopt-tutorial: )?runs with \S+ will (work|fail \(see).*")
    assert all(verdict.fullmatch(text.splitlines()[-1]) for text in told), told
    return [(each.returncode, text) for each, text in zip(started, told, strict=True)]


@pytest.fixture
def two():
    with hosts(2) as made:
        yield made


@pytest.mark.engines
class TestPeer:
    def test_that_is_healthy_is_called(self, two):
        for code, text in consult(two, (SECOND, *PATIENT), (FIRST, *PATIENT)):
            assert code == 0, text
            assert re.search(f"\nok +peer +{pattern(TIMES).pattern}\n", text), text

    def test_on_which_nobody_answers(self, two):
        ((code, text),) = consult(two, (SECOND, "--wait", "0"))
        say = f"no doctor answers on {SECOND}: start it there too, both with --wait 60"
        assert f"fails   peer      {say}\n" in text
        assert code == 1

    def test_whose_name_has_no_address(self, two):
        ((code, text),) = consult(two, ["host9"])
        say = "host9 has no address: add it to /etc/hosts, or give an address"
        assert f"fails   interface {say}\n" in text
        assert code == 1

    def test_that_is_this_host(self, two):
        ((code, text),) = consult(two, (FIRST, "--wait", "0"))
        assert f"peer      {FIRST} is this very host: name the other one\n" in text
        assert code == 1

    def test_that_an_interface_does_not_lead_to(self, two):
        both = (SECOND, *PATIENT), (FIRST, *PATIENT)
        told = consult(two, *both, CDOPT_TUTORIAL_INTERFACE="lo")
        ends = ["lo (127.0.0.1)", f"eth0 ({SECOND})"]
        for (code, text), there in zip(told, ("host2", "host1"), strict=True):
            way = f"torch does not get from {ends[0]} to {ends[1]} on {there}"
            assert f"fails   peer      {way}{NO_WAY}\n" in text
            assert code == 1
            ends.reverse()

    def test_with_an_interface_that_is_not_there(self, two):
        ((code, text),) = consult(two, [SECOND], CDOPT_TUTORIAL_INTERFACE="none0")
        say = "interface is 'none0', but must be one of eth0, lo"
        assert f"fails   interface {say}\n" in text
        assert code == 1

    def test_that_is_cut_off(self, two):
        two.cut(2)
        told = consult(two, [SECOND], [FIRST])
        for (code, text), there in zip(told, (SECOND, FIRST), strict=True):
            say = f"{there} can't be reached over eth0: check the link and firewalls"
            assert f"fails   peer      {say}\n" in text
            assert code == 1

    def test_to_which_there_is_no_way(self, two):
        two.unplug(1)
        ((code, text),) = consult(two, [SECOND])
        say = f"none leads to {SECOND}: check the link and the routes"
        assert f"fails   interface {say}\n" in text
        assert code == 1
