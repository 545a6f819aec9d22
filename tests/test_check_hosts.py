"""The program that checks hosts: what it finds out, and that it ends in any case."""

import platform
import re
from pathlib import Path

import pytest
import torch
from hosts import NET, PATIENCE, hosts
from test_bare import fits_a_page, imported

PROGRAM = Path(__file__).parents[1] / "book" / "jobs" / "check_hosts.py"
RIGHT = r"a call to rank {} takes [\d.]+ ms, an all-reduce is right"
# Has Python say, where it finds this as it begins, that it is of another version.
OTHER = "import platform\nplatform.python_version = lambda: '3.10.0'\n"


def test_it_fits_a_page_and_needs_torch_only():
    text = PROGRAM.read_text()
    assert fits_a_page(text) and imported(text) == {"torch"}


@pytest.mark.engines
@pytest.mark.parametrize("device", ["eth0", "lo"])
def test_two_hosts_reach_each_other_by_the_device_between_them_only(device, tmp_path):
    """If they do, they name their versions, which differ."""
    (tmp_path / "sitecustomize.py").write_text(OTHER)
    own = dict.fromkeys(["TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"], device)
    own["PYTHONPATH"] = str(PROGRAM.parent)
    other = {"PYTHONPATH": f"{tmp_path}:{PROGRAM.parent}"}
    seconds = PATIENCE if device == "eth0" else 8  # one of them waits in vain
    limit, run = f"--timeout={seconds}", {"module": PROGRAM.stem, "env": (own, other)}
    with hosts(2) as two:
        ends = two.torchrun([1, 1], limit, **run).end()
    codes, said = zip(*ends, strict=True)
    own = r"^(?:rank \d is|a call|\S+, [\d.]+, ).*$"  # and not torch's
    lines = [re.findall(own, text, re.MULTILINE) for text in said]
    names = [f"host{i}, {NET}.{i}, listening on {device}" for i in (1, 2)]
    if device == "lo":
        assert codes == (1, 1)
        assert re.fullmatch(rf"{names[0]}: no .* rank 1 within 8 s", lines[0][-1])
        return
    assert codes == (0, 0)
    pythons = platform.python_version(), "3.10.0"
    versions = [f"Python {python}, torch {torch.__version__}" for python in pythons]
    for rank, (*said, last) in enumerate(lines):
        expected = [f"rank {i} is {names[i]}: {versions[i]}" for i in range(2)]
        expected[1 - rank] += f", but {names[rank]} has {versions[rank]}"
        assert said == expected
        assert re.fullmatch(RIGHT.format(1 - rank), last)
