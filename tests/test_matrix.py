"""The matrix of versions and machines: a simulated machine is obeyed."""

from functools import partial

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
    call = partial(matrix.run, tmp_path, matrix.variables(path, 3))
    said = call("-W", "error", "-c", ASK).splitlines()
    found = {"default": [], "avx2": ["X86_V3"]}[path]
    assert said == [f"{path.upper()} 3", f"{found}", "[]"]
    with pytest.raises(SystemExit, match="^no such torch$"):
        call("-c", "print('so\\nno such torch'); exit(1)")
