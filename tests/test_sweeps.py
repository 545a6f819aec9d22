"""The sweeps: smoke runs find no fault, and a simulated machine is obeyed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import need_hosts
from sweeps import matrix, soak

# What libraries use, and variables that are this Python's own.
ASK = """
import numpy, os, torch
print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
print(sorted(numpy.show_config("dicts")["SIMD Extensions"].get("found", [])))
print([name for name in os.environ if name in ("CI", "PYTHONHASHSEED")])
"""


@pytest.mark.engines
def test_a_smoke_run_finds_all_as_promised(tmp_path):
    need_hosts()
    runs = smoke_run("lost", tmp_path)
    kinds = sorted(run["kind"] for run in runs if not run["ended"])
    assert kinds == ["cut", "kill", "no loss", "no loss"]


@pytest.mark.engines  # since it takes as long
def test_a_smoke_run_that_stops_launches_commands_and_kernels_leaves_nothing(tmp_path):
    runs = smoke_run("soak", tmp_path)
    assert {run["what"] for run in runs} == {*soak.WAYS}
    for run in runs:
        assert 50 < run["memory in MB"] < 5000
        assert run["processes below"] == 2  # fork server, resource tracker


def smoke_run(sweep: str, folder: Path) -> list[dict[str, Any]]:
    """What became of its runs, in a process that fails if one is not as promised."""
    file = folder / "runs.json"
    command = [sys.executable, "-m", "sweeps", sweep, "--smoke", "--json", file]
    here = Path(__file__).parent
    subprocess.run(command, cwd=here, check=True)
    return json.loads(file.read_text())["runs"]


@pytest.mark.parametrize("path", ["default", "avx2"])
def test_a_machine_is_obeyed_without_a_warning(path, tmp_path, monkeypatch):
    """By torch and numpy themselves, in a process of this very Python."""
    if path not in matrix.paths()[:-1]:
        pytest.skip(f"this CPU has no code path above {path}")
    for name in "CI", "PYTHONHASHSEED":
        monkeypatch.setenv(name, "1")
    place = matrix.Place(tmp_path, {}, None, None)
    place.machine = matrix.Machine(path, 3)
    place.copy.mkdir()
    said = place.call(sys.executable, "-W", "error", "-c", ASK).splitlines()
    found = {"default": [], "avx2": ["X86_V3"]}[path]
    assert said == [f"{path.upper()} 3", f"{found}", "[]"]
    mkl = {"default": "COMPATIBLE", "avx2": "AVX2"}[path]  # MKL itself can't be queried
    assert place.machine.variables()["MKL_CBWR"] == mkl
    with pytest.raises(matrix.StepFailed, match="^no such torch$"):
        place.call(sys.executable, "-c", "print('so\\nno such torch'); exit(1)")
