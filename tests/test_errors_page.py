"""The errors page lists the lines that commands print: all of them, and no others."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from clumsy import pattern

ROW = re.compile(r"^\| (`+) ?(.+?) ?\1 \|", re.MULTILINE)
# Files besides the tests that have a line, or check it.
BESIDE = "Makefile", ".ci/preflight.py", "notebooks/01_reinforce.ipynb"


@pytest.fixture(scope="module")
def page(project) -> list[str]:
    """The lines on the page."""
    text = (project.root / "book/errors.md").read_text()
    return [line for _, line in ROW.findall(text)]


@pytest.fixture(scope="module")
def said() -> list[str]:
    """The lines that clumsy calls come to."""
    files = Path(__file__).parent.glob("test_clumsy_*.py")
    return [line for file in files for line in import_module(file.stem).LINES]


def test_every_line_that_is_said_is_on_the_page(page, said):
    known = [*map(pattern, page)]
    for line in said:
        assert any(each.fullmatch(line) for each in known), line


def test_every_line_on_the_page_is_said(page, said, project):
    files = *project.root.glob("tests/*.py"), *(project.root / name for name in BESIDE)
    text = "".join(file.read_text() for file in files).replace('\\"', '"')
    for line in page:
        # Other tests have at least its longest fixed part.
        part = max(line.split("..."), key=len).strip()
        assert any(map(pattern(line).fullmatch, said)) or part in text, line


def test_every_test_that_a_page_names_is_there(project):
    tests = "".join(file.read_text() for file in project.root.glob("tests/*.py"))
    for page in project.root.glob("book/*.md"):
        for name in re.findall(r"`(?:tests/\w+\.py::)?(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, (page.name, name)
