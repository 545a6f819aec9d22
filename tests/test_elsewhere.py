"""The programs for other libraries, which are not installed here: what can be read."""

import ast
import re
import sys
from pathlib import Path

import pytest

BOOK = Path(__file__).parents[1] / "book"
PROGRAMS = sorted((BOOK / "elsewhere").glob("*.py"))
LINES, COLUMNS = 60, 88  # as a bare program of a chapter
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # where pip's name is another one

every_program = pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)


def imported(source):
    """The modules outside of Python's library that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


def section(path):
    """What the page says of a program: the part with its listing."""
    page = (BOOK / "elsewhere.md").read_text()
    shows = f"{{literalinclude}} elsewhere/{path.name}"
    (own,) = [part for part in page.split("\n## ") if shows in part]
    return own.replace("\\\n", "")  # a command may go on in the next line


def test_there_are_programs():
    assert [path.stem for path in PROGRAMS] == ["torchrec_digits", "torchrl_cartpole"]


@every_program
def test_it_compiles_and_fits_a_page(path):
    source = path.read_text()
    compile(source, path.name, "exec")
    lines = source.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS


@every_program
def test_it_says_how_to_run_it(path):
    assert f"`python {path.name}`" in ast.get_docstring(ast.parse(path.read_text()))


@every_program
def test_the_page_installs_what_it_imports_at_a_version(path):
    own = section(path)
    for name in imported(path.read_text()):
        pip = DISTRIBUTIONS.get(name, name)
        assert re.search(rf"pip install .*\b{pip}(==|<|\n| )", own), name
