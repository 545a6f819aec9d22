"""Other versions and machines: what is noted of them, and what a machine is."""

import argparse
import json
import re
import sys

import pytest
import tomlkit
from books import smallest_book
from sweeps import matrix

# What libraries take, and this Python's own settings.
ASK = """
import numpy, os, torch
print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
print(sorted(numpy.show_config("dicts")["SIMD Extensions"].get("found", [])))
print([name for name in os.environ if name in ("CI", "PYTHONHASHSEED")])
"""
TABLE = "near = {at_most = 9, seen = 8.0}\nsame = {at_most = 7, seen = 7}\n"
PINS = "cdopt==0.5\nJinja2==3.1\nnumpy==2.4\nnumpy-extra==1\ntorch==2.0\nsympy==1.1\n"
HERE = {"python": "3.12.4", "torch": "t", "cdopt": "c"}
FAILED = "<failure message='1 != 2&#10;x'/>"


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs one of a small book; its steps answer what a test says, and are noted."""
    book = smallest_book(tmp_path / "a book")
    (book.root / "constraints.txt").write_text(PINS)
    reference = book.root / "notebooks/reference.toml"
    reference.write_text(f"[01_a.figures]\n{TABLE}")
    monkeypatch.setattr("cdopt_tutorial.publish.project.this_project", lambda: book)
    asked = []

    def run(flags, chapters, *cases):
        def call(place, *command, file=None, codes=(0,)):
            asked.append(" ".join(map(str, command[1:])))
            if "torch==9.9" in asked[-1] or (file and place.machine.threads == 7):
                raise matrix.StepFailed("no such torch")
            if "install" in asked[-1]:
                asked.append((place.folder / "constraints.txt").read_text())
            if file:
                file.write_text({"tests.xml": tests}.get(file.name, found))
            return f"a warning\n{json.dumps(HERE)}"

        tests = "".join(
            f"<testcase classname='a' name='t'>{c}</testcase>" for c in cases
        )
        tests = f"<testsuites>{tests}</testsuites>"
        found = {
            f"notebooks/{name}.ipynb": {"error": why, "why": why, "figures": figures}
            for name, (why, figures) in chapters.items()
        }
        found = json.dumps({"chapters": found})
        monkeypatch.setattr(matrix.Place, "call", call)
        matrix.add(parser := argparse.ArgumentParser())
        return matrix.run(parser.parse_args(flags.split())), asked, reference

    return run


def test_it_names_what_moved_and_what_fails_and_goes_on(sweep, capsys):
    chapters = {"01_a": (None, {"near": 8.25, "same": 8})}
    assert sweep("--torch 2.11", chapters)[0] == 3
    rows = "| near | 8 | at most 9 | 8.25 |\n| same | 7 | at most 7 | **8** |"
    assert rows in capsys.readouterr().out
    chapters["02_b"] = "KeyError: 'x'", {}
    flags = "--torch 9.9 --torch 2.11"
    assert sweep(flags, chapters, "", FAILED, "<error/>", "<skipped/>")[0] == 1
    said = capsys.readouterr().out
    assert re.search(r"\| 9.9 \| – .*\n\| 3.12.4 \| t .* \| 1 of 2 \| 2 of 3 \|", said)
    assert re.search("torch 9.9, .*: `installing failed: no such torch`", said)
    for failure in "02_b failed: KeyError: 'x'", "a::t failed: no reason":
        assert re.search(f"torch t, .*: `{failure}`", said)


def test_machines_share_an_environment_and_add_to_the_reference(sweep):
    chapters = {"01_a": (None, {"near": 8.5, "new": 1.0}), "02_b": ("no", {"x": 1})}
    flags = "--torch 2.11 --threads 1 --threads 7 --threads 2 --update-reference"
    code, asked, reference = sweep(flags, chapters, "")
    assert code == 1 and sum("-m venv" in each for each in asked) == 1
    assert asked[2] == "cdopt==0.5\nnumpy==2.4\nnumpy-extra==1\n"  # torch is chosen
    assert " -k one_process " in asked[5] and "engines" not in asked[5]
    (kept,) = tomlkit.parse(reference.read_text()).values()  # of what ran through
    near, new = {"at_most": 9, "seen": [8.0, 8.5]}, {"seen": 1.0}
    assert kept["figures"] == {"near": near, "new": new}
    for each, threads in zip(kept["runs"], (1, 2), strict=True):
        assert re.search(f", {threads} threads, .* Python 3.12.4, torch t$", each)


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
    mkl = {"default": "COMPATIBLE", "avx2": "AVX2"}[path]  # which can't be asked
    assert place.machine.variables()["MKL_CBWR"] == mkl
    with pytest.raises(matrix.StepFailed, match="^no such torch$"):
        place.call(sys.executable, "-c", "print('so\\nno such torch'); exit(1)")
