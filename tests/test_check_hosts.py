"""The program that checks hosts: what it finds out, and that it ends in any case."""

import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hosts import NET, PATIENCE, PORT, TORCHRUN, hosts
from test_bare import fits_a_page, imported
from torch.distributed import TCPStore

PROGRAM = Path(__file__).parents[1] / "book" / "jobs" / "check_hosts.py"
RIGHT = r"a call of rank {} takes [\d.]+ ms, an all-reduce is right"
LOOPBACK = f"{socket.gethostname()}, 127.0.0.1, listening on lo"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
# Has Python say, where it finds this as it begins, that it is of another version.
OTHER = "import platform\nplatform.python_version = lambda: '3.10.0'\n"


def command(rank, master, port, seconds=PATIENCE):
    """Torchrun on one of two hosts; the program has so many seconds."""
    options = ["--nnodes", "2", "--node-rank", f"{rank}", "--nproc-per-node", "1"]
    options += ["--master-addr", master, "--master-port", f"{port}"]
    options += ["--rdzv-conf", f"timeout={PATIENCE}"]
    return [*TORCHRUN, *options, str(PROGRAM), "--timeout", f"{seconds}"]


def ends(runs):
    """Each run's exit code, and what the program itself printed, torch apart."""
    said = [run.communicate(timeout=2 * PATIENCE)[0] for run in runs]
    own = [
        re.findall(r"^(?:rank \d is|a call|\S+, [\d.]+, ).*$", s, re.M) for s in said
    ]
    return [(run.returncode, lines) for run, lines in zip(runs, own, strict=True)]


def test_it_fits_a_page_and_needs_torch_only():
    text = PROGRAM.read_text()
    assert fits_a_page(text) and imported(text) == {"torch"}


@pytest.mark.engines
@pytest.mark.parametrize("other", ["", OTHER], ids=["one version", "two versions"])
def test_two_torchruns_on_loopback_name_versions_that_differ(other, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(other)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    runs = []
    for rank, more in enumerate([{}, {"PYTHONPATH": str(tmp_path)}]):
        args = command(rank, "127.0.0.1", port)
        runs.append(subprocess.Popen(args, env=os.environ | more, **PIPES))
    pythons = [platform.python_version()] * 2
    if other:
        pythons[1] = "3.10.0"
    versions = [f"Python {python}, torch {torch.__version__}" for python in pythons]
    for rank, (code, (*lines, last)) in enumerate(ends(runs)):
        assert code == 0
        assert re.fullmatch(RIGHT.format(1 - rank), last)
        names = [f"rank {i} is {LOOPBACK}: {has}" for i, has in enumerate(versions)]
        if other:
            names[1 - rank] += f", but {LOOPBACK} has {versions[rank]}"
        assert lines == names


def test_a_process_that_stays_alone_says_who_has_not_come():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "RANK": "0"}
    alone |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    args = [sys.executable, PROGRAM, "--timeout", "10"]
    run = subprocess.Popen(args, env=os.environ | alone, **PIPES)
    ((code, lines),) = ends([run])
    assert code == 1
    assert lines[-1] == f"{LOOPBACK}: no sign of rank 1 within 10 s"


@pytest.mark.engines
@pytest.mark.parametrize("device", ["eth0", "lo"])
def test_two_hosts_reach_each_other_by_the_device_between_them_only(device):
    variables = dict.fromkeys(["TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"], device)
    seconds = PATIENCE if device == "eth0" else 20  # one of them waits in vain
    with hosts(2) as two:
        runs = []
        for rank, more in enumerate([variables, {}]):
            args = command(rank, f"{NET}.1", PORT, seconds)
            runs.append(two.start(rank + 1, *args, env=os.environ | more))
        (here, first), (there, second) = ends(runs)
    assert here == there == (device == "lo")
    if device == "lo":
        own = f"host1, {NET}.1, listening on lo: "
        assert re.fullmatch(rf"{own}no .* rank 1 within 20 s", first[-1])
    else:
        for lines, other in (first, 1), (second, 0):
            assert re.fullmatch(RIGHT.format(other), lines[-1])
