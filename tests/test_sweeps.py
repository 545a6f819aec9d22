"""The sweeps: smoke runs find no fault, and a simulated machine is obeyed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import need_hosts
from sweeps import lost, matrix, soak

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
    rows = smoke_run("lost", tmp_path)
    kinds = {name.rpartition(":")[0] for name in rows}
    assert len(kinds) == 2 * len(lost.SMOKE)  # each with its loss, and with none
    for kind in kinds:
        assert rows[f"{kind}: as promised"] == rows[f"{kind}: runs"] > 0
        assert rows[f"{kind}: processes left"] == 0


@pytest.mark.engines  # since it takes as long
def test_a_smoke_run_that_stops_launches_commands_and_kernels_leaves_nothing(tmp_path):
    rows = smoke_run("soak", tmp_path)
    for way in soak.WAYS:
        assert rows[f"{way}: not as promised"] == 0
        assert 50 < rows[f"{way}: memory in MB"] < 5000
        assert rows[f"{way}: processes below"] == 2  # fork server, resource tracker


def smoke_run(sweep: str, folder: Path) -> dict[str, float]:
    """The values of the rows that a sweep finds in a process of its own."""
    file = folder / "rows.json"
    command = [sys.executable, "-m", "sweeps", sweep, "--smoke", "--json", file]
    here = Path(__file__).parent
    subprocess.run(command, cwd=here, check=True)
    return {row["name"]: row["value"] for row in json.loads(file.read_text())["rows"]}


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
