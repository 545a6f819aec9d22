"""The page of errors and what is said are the same: no line too many, none missing."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from clumsy import DIVERGED, pattern

ROW = re.compile(r"^\| (`+) ?(.+?) ?\1 \|", re.MULTILINE)
# Lines of which another file holds the longest part that never differs.
ELSEWHERE = {
    "Makefile": [
        "... is missing: install Python 3.11 or newer, or name one with make "
        "PYTHON=...",
    ],
    ".ci/preflight.py": [
        "Python is ...: 3.11 is needed; make PYTHON=... names another",
        "Python has no venv module: apt install python...-venv",
        "... GB of disk are free here: ... GB are needed",
    ],
    "tests/test_launch.py": [
        "... returned what can't be unpickled",
        "... was killed as it started",
        "... was killed by ...",
        "... exited with code ... before it finished",
        "... raised ... in a call that ... made",
        "... missed the deadline of ... s to join",
        "... missed the run's deadline of ... s",
    ],
    "tests/test_hybrid.py": [
        "... was stopped (SIGSTOP) and did not go on",
        "... missed its deadline of ... s for its part of a step",
    ],
    "tests/clumsy.py": [DIVERGED],
    "tests/test_commands.py": ["... raised ..."],
    "tests/test_rnn_command.py": ["... can't write ...: ..."],
    "tests/test_stopping.py": [
        "interrupted",
        "terminated",
        "the terminal was closed",
        "... missed the deadline of ... s to start",
        "... was ended, since the process that starts workers was killed",
    ],
    "tests/test_network.py": [
        "workers share this machine's network: see the page 'Who can reach a run'",
    ],
    "tests/test_torchrun.py": [
        "torchrun has started ... processes, but this run has ... workers, ...",
        "... on ... was not heard of for 15 s",
    ],
    "tests/test_monarch.py": [
        "monarch would keep its log in ..., which is not this user's folder",
        "the engine monarch needs Monarch, which is not here: pip install ...",
    ],
    "tests/test_ray.py": [
        "... can't be reached",
        "ray has lost its ...",
        "ray could not be started on this host",
        "address is of a cluster of Ray, so it needs engine ray",
        "the engine ray needs Ray, which is not here: pip install ...",
        "the engine ... starts its workers itself, not torchrun",
        "trace is for torch RPC, and not for the engine ...",
        "max-restarts is ..., which needs a checkpoint",
        "... died",
        "... was not heard of for ... s",
        "ray can't join the cluster at ...",
    ],
    "notebooks/01_reinforce.ipynb": ["the book's package is missing: see 'Set up'"],
    "tests/test_execute.py": [
        "... failed in code cell ... of ..., which begins",
        "... failed in no cell: the kernel did not start",
        "A cell timed out while it was being executed, after ... seconds.",
    ],
    "tests/test_render.py": [
        "the pages do not build cleanly:",
        "a chapter failed: its page says what to do",
        "... has no valid result: run ...",
        "book/versions.json can't be read: ...",
    ],
    "tests/test_matrix.py": ["... of ... environments failed"],
}


@pytest.fixture(scope="module")
def page(project) -> list[str]:
    """The lines on the page."""
    text = (project.root / "book/errors.md").read_text()
    return [line for _, line in ROW.findall(text)]


def test_every_line_that_is_said_is_on_the_page(page):
    known = [*map(pattern, page)]
    for file in Path(__file__).parent.glob("test_clumsy_*.py"):
        for line in import_module(file.stem).LINES:
            assert any(each.fullmatch(line) for each in known), (file.name, line)


def test_every_line_on_the_page_is_said(page, project):
    files = Path(__file__).parent.glob("test_clumsy_*.py")
    said = [line for file in files for line in import_module(file.stem).LINES]
    elsewhere = [line for lines in ELSEWHERE.values() for line in lines]
    for line in page:
        known = line in elsewhere or any(map(pattern(line).fullmatch, said))
        assert known, line
    assert set(elsewhere) <= set(page)


@pytest.mark.parametrize("file", ELSEWHERE)
def test_lines_that_other_files_hold_are_there(file, project):
    text = (project.root / file).read_text().replace('\\"', '"')
    for line in ELSEWHERE[file]:
        assert max(line.split("..."), key=len).strip() in text, line


def test_every_test_that_a_page_names_is_there(project):
    tests = "".join(file.read_text() for file in project.root.glob("tests/*.py"))
    for page in project.root.glob("book/*.md"):
        for name in re.findall(r"`(?:tests/\w+\.py::)?(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, (page.name, name)
