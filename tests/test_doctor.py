"""The doctor: its findings on a machine and on a peer, and its verdict."""

import json
import os
import re
import resource
import shutil
import socket
import warnings
from types import SimpleNamespace

import pytest
import torch
from clumsy import pattern
from hosts import NET, PATIENCE, hosts
from running import COMMAND

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
FULL = SimpleNamespace(free=0)
TIMES = "a call takes ... ms, an all-reduce of 16 kB ... ms"


@pytest.fixture
def examine(monkeypatch, tmp_path, capsys):
    """Runs the command: its code, its verdict, and each finding's level and text."""
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
            assert "{level:<7} {about:<10}{text}\n".format(**each) in said.out
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


#: What is wrong with a machine: the finding's level and subject, what is replaced by
#: what, and the finding's text.
WRONG = [
    ("remark", "name", peer, "resolve", lambda name: "127.0.1.1", OWN_NAME),
    ("remark", "interface", store, "interface", fail, NO_WAY_OUT),
    ("remark", "network", own_network, "is_allowed", lambda: False, REFUSED),
    ("remark", "versions", doctor, "find_spec", lambda name: None, NO_RAY),
    ("remark", "GPUs", doctor, "gpus_of", warn, OLD_DRIVER),
    ("fails", "machine", checks, "free_memory", lambda: 9 * checks.MB, TOO_LITTLE),
    ("fails", "machine", shutil, "disk_usage", lambda folder: FULL, TOO_LITTLE),
    ("fails", "machine", resource, "getrlimit", lambda kind: (99, 99), FEW_FILES),
]
VERDICTS = {
    "remark": "runs on this host will work, with remarks (see book/...)",
    "fails": "runs on this host will fail (see book/errors.md#the-doctor)",
}


@pytest.mark.parametrize("level, about, where, name, value, line", WRONG)
def test_what_is_wrong_is_a_remark_or_fails(
    level, about, where, name, value, line, examine, monkeypatch
):
    monkeypatch.setattr(where, name, value)
    code, verdict, found = examine()
    assert (code, found[about][0]) == (level == "fails", level)
    assert pattern(line).fullmatch(found[about][1])
    assert pattern(VERDICTS[level]).fullmatch(verdict)


def test_gpus_need_nccl(examine, monkeypatch):
    monkeypatch.setattr(doctor, "gpus_of", lambda device: ("cuda:0", "cuda:1"))
    lacks = "2, but this torch has no NCCL: workers use gloo"
    for has, text in (True, "2, with NCCL"), (False, lacks):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda has=has: has)
        assert examine()[2]["GPUs"] == ("ok" if has else "remark", text)


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


FIRST, SECOND, PATIENT = f"{NET}.1", f"{NET}.2", ("--wait", "300")
BOTH = (SECOND, *PATIENT), (FIRST, *PATIENT)
NOBODY = "no doctor answers on {}: start it there too, both with --wait 60"
NO_ADDRESS = "host9 has no address: add it to /etc/hosts, or give an address"
NO_PATH = "torch does not get from {} to {} on {}" + NO_WAY
CUT_OFF = "{} can't be reached over eth0: check the link and firewalls"
SETTING = "interface is 'none0', but must be one of eth0, lo"
#: The arguments of one doctor or two; the level and subject of a finding; its texts.
#: "cut" and "unplug" are done before; "over" sets the first doctor's interface.
PEERS = {
    "healthy": (BOTH, "ok peer", [TIMES, TIMES]),
    "silent": ([(SECOND, "--wait", "0")], "fails peer", [NOBODY.format(SECOND)]),
    "unknown": ([["host9"]], "fails interface", [NO_ADDRESS]),
    "this host": (
        [(FIRST, "--wait", "0")], "fails peer",
        [f"{FIRST} is this very host: name the other one"],
    ),
    "over lo": (
        BOTH, "fails peer",
        [
            NO_PATH.format("lo (127.0.0.1)", f"eth0 ({SECOND})", "host2"),
            NO_PATH.format(f"eth0 ({SECOND})", "lo (127.0.0.1)", "host1"),
        ],
    ),
    "over none0": ([[SECOND]], "fails interface", [SETTING]),
    "cut": ([[SECOND], [FIRST]], "fails peer", [*map(CUT_OFF.format, (SECOND, FIRST))]),
    "unplug": (
        [[SECOND]], "fails interface",
        [f"none leads to {SECOND}: check the link and the routes"],
    ),
}  # fmt: skip


@pytest.mark.engines
@pytest.mark.parametrize("how", PEERS)
def test_a_peer_is(how):
    doctors, kind, lines = PEERS[how]
    level, about = kind.split()
    own = {store.INTERFACE: how.split()[-1]} if how.startswith("over") else {}
    started = []
    with hosts(2) as two:
        if how in ("cut", "unplug"):
            getattr(two, how)(len(doctors))
        for number, args in enumerate(doctors, start=1):
            command = [*COMMAND, "doctor", "--peer", *args]
            started.append(two.start(number, *command, env=os.environ | own))
            own = {}
        texts = [each.communicate(timeout=PATIENCE)[0] for each in started]
    verdict = re.compile(r"(cdopt-tutorial: )?runs with \S+ will (work|fail \(see).*")
    for run, text, line in zip(started, texts, lines, strict=True):
        assert run.returncode == (level == "fails"), text
        assert verdict.fullmatch(text.splitlines()[-1]), text
        seen = re.compile(f"^{level:<7} {about:<10}{pattern(line).pattern}$", re.M)
        assert seen.search(text), text
