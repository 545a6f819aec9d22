"""The matrix of versions and machines: a simulated machine is obeyed."""

import sys

import matrix
import pytest

# What libraries use, and variables that are this Python's own.
ASK = """
import numpy, os, torch
print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
print(sorted(numpy.show_config("dicts")["SIMD Extensions"].get("found", [])))
print([name for name in os.environ if name in ("CI", "PYTHONHASHSEED")])
"""


@pytest.mark.parametrize("path", ["default", "avx2"])
def test_a_machine_is_obeyed_without_a_warning(path, tmp_path, monkeypatch):
    """By torch and numpy themselves, in a process of this very Python."""
    if path not in matrix.paths()[:-1]:
        pytest.skip(f"this CPU has no code path above {path}")
    for name in "CI", "PYTHONHASHSEED":
        monkeypatch.setenv(name, "1")
    place, machine = matrix.Place(tmp_path, ("", "", ""), None), matrix.Machine(path, 3)
    place.copy.mkdir()
    said = place.call(machine, sys.executable, "-W", "error", "-c", ASK).splitlines()
    found = {"default": [], "avx2": ["X86_V3"]}[path]
    assert said == [f"{path.upper()} 3", f"{found}", "[]"]
    mkl = {"default": "COMPATIBLE", "avx2": "AVX2"}[path]  # MKL itself can't be queried
    assert machine.variables()["MKL_CBWR"] == mkl
    with pytest.raises(matrix.StepFailed, match="^no such torch$"):
        place.call(
            machine, sys.executable, "-c", "print('so\\nno such torch'); exit(1)"
        )
