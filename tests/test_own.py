"""The page "Write your own system": its code runs, and prints what the page says."""

import os
import re
import subprocess
import sys

import pytest
import torch
from hosts import PATIENCE, hosts
from torch.distributed import rpc

from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.run import Role, WorkerError, launch

ROOT = this_project().root
PAGE = (ROOT / "book/own.md").read_text()
BLOCKS = re.findall(r"^```(python|text|sh)\n(.*?)^```$", PAGE, re.S | re.M)
# Code, and what it prints, which is the next block, or nothing.
PAIRS = zip(BLOCKS, BLOCKS[1:], strict=False)
PROGRAMS = [(c, s * (k == "text")) for (kind, c), (k, s) in PAIRS if kind == "python"]
PLAIN, PACKAGE = PROGRAMS[0][0], PROGRAMS[1][0]
MAIN = 'if __name__ == "__main__":\n'
(ON_HOSTS,) = (code for code, _ in PROGRAMS if code.startswith(MAIN))
CELLS = [each for each in PROGRAMS[1:] if each[0] != ON_HOSTS]
# As in a notebook: one after the other, and an error does not end it.
RUN = r"""
for block in blocks:
    try:
        exec(compile(block, "own.md", "exec"), globals())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    print(end="\0", flush=True)
"""


def python(folder, code, typed=""):
    """What a program prints, errors included."""
    (folder / "own.py").write_text(code)
    how = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    how |= {"stderr": subprocess.STDOUT, "timeout": PATIENCE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-Wignore", "own.py"]
    return subprocess.run(command, input=typed, **how).stdout


def test_each_block_prints_what_the_page_says(tmp_path):
    run = f"blocks = {[code for code, _ in CELLS]!r}\n{RUN}"
    *printed, _ = python(tmp_path, run).split("\0")
    for (code, said), found in zip(CELLS, printed, strict=True):
        found = found.replace("Can't get local", "Can't pickle local")  # Python 3.13
        pattern = ".*".join(map(re.escape, said.strip().split("...")))
        assert re.fullmatch(pattern, found.strip(), re.S), (code, found)


def test_the_plain_program_is_short_and_takes_another_worker(tmp_path):
    assert len(PLAIN.splitlines()) <= 40
    three = PLAIN.replace('"client"]', '"client", "idle"]').replace("2, o", "3, o")
    for code in PLAIN, three.replace("], 2)", "], 3)"):
        assert python(tmp_path, code) == PROGRAMS[0][1]


def test_both_programs_have_the_loss_of_one_process():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(1, 1), torch.linspace(-1, 1, 11)[:, None]
    for _ in range(50):
        layer.zero_grad()
        (loss := (layer(x) - 2 * x - 1).square().mean()).backward()
        for parameter in layer.parameters():
            parameter.data -= 0.1 * parameter.grad
    assert f"loss {loss:.4f}\n" == PROGRAMS[0][1] == PROGRAMS[1][1]


def test_limits_are_as_the_page_says():
    options, ours = rpc.TensorPipeRpcBackendOptions(), launch.__kwdefaults__
    assert (options.rpc_timeout, options.num_worker_threads) == (60, 16)
    ours = [ours[name] for name in ("deadline", "rpc_timeout", "rpc_threads")]
    assert ours == [600, 120, 4]


def test_a_breakpoint_stops_where_there_are_no_workers_only(tmp_path):
    definitions, *_ = PACKAGE.partition("roles =")
    code = definitions.replace("  move(", "  breakpoint()\n        move(")
    code += "from cdopt_tutorial.calls import alone\nwith alone():\n    client()\n"
    assert "step of 1" in python(tmp_path, code, "p f'step of {len(self.bias)}'\nq\n")
    with pytest.raises(WorkerError, match="client raised BdbQuit"):
        launch({"client": Role(breakpoint)})


@pytest.mark.engines
def test_the_package_s_program_runs_on_ray(tmp_path):
    pytest.importorskip("ray")
    code = f"RAY = 'ray'\n{PACKAGE}".replace("(roles)", "(roles, on=RAY)")
    assert PROGRAMS[1][1] in python(tmp_path, code)


@pytest.mark.engines
@pytest.mark.parametrize("own", ["plain", "package"])
def test_both_programs_run_on_two_hosts(own, tmp_path, monkeypatch):
    code = PACKAGE if own == "package" else PLAIN.partition(MAIN)[0] + ON_HOSTS
    (tmp_path / "own_system.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with hosts(2) as made:
        ends = made.torchrun([1, 1], module="own_system").end()
    assert [code for code, _ in ends] == [0, 0], ends
    assert PROGRAMS[0][1] in "".join(said for _, said in ends)
