"""Other versions and machines: what is run and noted, by a Python that pretends."""

import argparse
import json
import re
import sys

import pytest
import tomlkit
from books import smallest_book
from sweeps import matrix

# An interpreter that makes an environment of itself, and notes what it is asked for;
# version 9.9 of torch does not install. With seven threads no chapter can begin.
FAKE = """\
#!/bin/sh
echo "$CI$PYTHONPATH $*" >> {folder}/calls
for last; do :; done
case "$*" in
    -c*) echo a warning; echo '{{"python": "3.12.4", "torch": "t", "cdopt": "c"}}' ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"install"*torch==9.9*) echo some words; echo "no such torch"; exit 1 ;;
    *"install"*) cp "$7" {folder}/constraints ;;
    *execute*) [ "$OMP_NUM_THREADS" = 7 ] || cp {folder}/chapters "$last"; exit 3 ;;
    *pytest*) cp {folder}/tests "$last"; exit 1 ;;
esac
"""
# What libraries take.
ASK = """
import numpy, torch
print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
print(sorted(numpy.show_config("dicts")["SIMD Extensions"].get("found", [])))
"""
TABLE = "near = {at_most = 9, seen = 8.0}\nsame = {at_most = 7, seen = 7}\n"
PINS = "cdopt==0.5\nJinja2==3.1\nnumpy==2.4\nnumpy-extra==1\ntorch==2.0\nsympy==1.1\n"
FIGURES = {"near": 8.0, "same": 7}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The folder of such an interpreter, of what it answers with, and of a book."""
    book = smallest_book(tmp_path / "a book")
    (book.root / "constraints.txt").write_text(PINS)
    (book.root / "notebooks/reference.toml").write_text(f"[01_a.figures]\n{TABLE}")
    monkeypatch.setattr("cdopt_tutorial.publish.project.this_project", lambda: book)
    monkeypatch.setenv("PYTHONPATH", "of this one")
    monkeypatch.setenv("CI", "in CI")
    python = tmp_path / "python"
    python.write_text(FAKE.format(folder=tmp_path))
    python.chmod(0o755)
    write_answers(tmp_path, {"01_a": (None, FIGURES)}, "", "", "<skipped/>")
    return tmp_path


def write_answers(folder, chapters, *cases):
    found = {
        f"notebooks/{name}.ipynb": {"error": why, "why": why, "figures": figures}
        for name, (why, figures) in chapters.items()
    }
    (folder / "chapters").write_text(json.dumps({"chapters": found}))
    cases = [f"<testcase classname='a' name='t'>{each}</testcase>" for each in cases]
    (folder / "tests").write_text(f"<testsuites>{''.join(cases)}</testsuites>")


def run(flags):
    """The exit code of the sweep."""
    parser = argparse.ArgumentParser()
    matrix.add(parser)
    return matrix.run(parser.parse_args(flags.split()))


def test_it_names_what_moved_and_what_fails_and_goes_on(fake, capsys):
    chapters = {"01_a": (None, FIGURES | {"near": 8.25, "same": 8})}
    write_answers(fake, chapters)
    flags = f"--python {fake}/python --torch"
    assert run(f"{flags} 2.11") == 3
    rows = "| near | 8 | at most 9 | 8.25 |\n| same | 7 | at most 7 | **8** |"
    assert rows in capsys.readouterr().out
    chapters["02_b"] = "KeyError: 'x'", {}
    write_answers(fake, chapters, "", "<failure message='1 != 2&#10;x'/>", "<error/>")
    assert run(f"{flags} 9.9 --torch 2.11") == 1
    said = capsys.readouterr().out
    assert re.search(r"\| 9.9 \| – .*\n\| 3.12.4 \| t .* \| 1 of 2 \| 2 of 3 \|", said)
    assert re.search("torch 9.9, .*: `installing failed: no such torch`", said)
    for failure in "02_b failed: KeyError: 'x'", "a::t failed: no reason":
        assert re.search(f"torch t, .*: `{failure}`", said)


def test_machines_share_an_environment_and_add_to_the_reference(fake):
    figures = {"near": 8.5, "new": 1.0}
    write_answers(fake, {"01_a": (None, figures), "02_b": ("failed", {"x": 1})})
    flags = "--threads 1 --threads 7 --threads 2 --update-reference"
    assert run(f"--python {fake}/python {flags}") == 1
    venv, install, _, execute, *others = (fake / "calls").read_text().splitlines()
    assert not any("-m venv" in each for each in others)
    # In a copy, with nothing of this Python; torch chooses the others for itself.
    assert re.fullmatch(r"/.+/project -m venv /.+/env", venv)
    assert install.endswith(" -e .[book,ray,test]")
    assert " execute --force --cell-timeout 3600 --json " in execute
    assert " -k one_process " in others[0] and "engines" not in others[0]
    kept = (fake / "constraints").read_text()
    assert kept == "cdopt==0.5\nnumpy==2.4\nnumpy-extra==1\ntorch==2.0\n"
    table = (fake / "a book/notebooks/reference.toml").read_text()
    (kept,) = tomlkit.parse(table).values()  # of the chapter that ran through
    near, new = {"at_most": 9, "seen": [8.0, 8.5]}, {"seen": 1.0}
    assert kept["figures"] == {"near": near, "new": new}
    for each, threads in zip(kept["runs"], (1, 2), strict=True):
        assert re.search(f", {threads} threads, .* Python 3.12.4, torch t$", each)


@pytest.mark.parametrize("path", ["default", "avx2"])
def test_a_machine_is_obeyed_without_a_warning(path, tmp_path):
    """By torch and numpy themselves, in a process of this very Python."""
    if path not in matrix.paths()[:-1]:
        pytest.skip(f"this CPU has no code path above {path}")
    place = matrix.Place(tmp_path, {}, None, None)
    place.machine = matrix.Machine(path, 3)
    place.copy.mkdir()
    said = place.call(sys.executable, "-W", "error", "-c", ASK).splitlines()
    found = {"default": [], "avx2": ["X86_V3"]}[path]
    assert said == [f"{path.upper()} 3", f"{found}"]
    mkl = {"default": "COMPATIBLE", "avx2": "AVX2"}[path]  # which can't be asked
    assert place.machine.variables()["MKL_CBWR"] == mkl
