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

PROGRAM = str(Path(__file__).parents[1] / "book" / "jobs" / "check_hosts.py")
RIGHT = r"a call to rank {} takes [\d.]+ ms, an all-reduce is right"
# Has Python say, where it finds this as it begins, that it is of another version.
OTHER = "import platform\nplatform.python_version = lambda: '3.10.0'\n"


def ends(run):
    """A run's exit code, and what the program itself printed, torch apart."""
    said, _ = run.communicate(timeout=2 * PATIENCE)
    own = r"^(?:rank \d is|a call|\S+, [\d.]+, ).*$"
    return run.returncode, re.findall(own, said, re.MULTILINE)


def test_it_fits_a_page_and_needs_torch_only():
    text = Path(PROGRAM).read_text()
    assert fits_a_page(text) and imported(text) == {"torch"}


def test_a_process_that_stays_alone_says_who_has_not_come():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "RANK": "0"}
    alone |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, PROGRAM, "--timeout", "4"]
    code, lines = ends(subprocess.Popen(command, env=os.environ | alone, **pipes))
    here = f"{socket.gethostname()}, 127.0.0.1, listening on lo"
    assert (code, lines[-1]) == (1, f"{here}: no sign of rank 1 within 4 s")


@pytest.mark.engines
@pytest.mark.parametrize("device", ["eth0", "lo"])
def test_two_hosts_reach_each_other_by_the_device_between_them_only(device, tmp_path):
    """If they do, they name their versions, which differ."""
    (tmp_path / "sitecustomize.py").write_text(OTHER)
    more = dict.fromkeys(["TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"], device)
    command = [*TORCHRUN, "--nnodes=2", f"--master-addr={NET}.1", "--master-port"]
    command += [str(PORT), f"--rdzv-conf=timeout={PATIENCE}"]
    seconds = PATIENCE if device == "eth0" else 8  # one of them waits in vain
    with hosts(2) as two:
        runs = []
        for rank, variables in enumerate([more, {"PYTHONPATH": str(tmp_path)}]):
            own = [f"--node-rank={rank}", PROGRAM, f"--timeout={seconds}"]
            env = os.environ | variables
            runs.append(two.start(rank + 1, *command, *own, env=env))
        codes, lines = zip(*map(ends, runs), strict=True)
    names = [f"host{i}, {NET}.{i}, listening on {device}" for i in (1, 2)]
    if device == "lo":
        assert codes == (1, 1)
        assert re.fullmatch(rf"{names[0]}: no .* rank 1 within 8 s", lines[0][-1])
        return
    assert codes == (0, 0)
    versions = [
        f"Python {python}, torch {torch.__version__}"
        for python in (platform.python_version(), "3.10.0")
    ]
    for rank, (*said, last) in enumerate(lines):
        expected = [f"rank {i} is {names[i]}: {versions[i]}" for i in range(2)]
        expected[1 - rank] += f", but {names[rank]} has {versions[rank]}"
        assert said == expected
        assert re.fullmatch(RIGHT.format(1 - rank), last)
