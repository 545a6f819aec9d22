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


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_fits_a_page_which_installs_what_it_imports(path):
    source, own = path.read_text(), section(path)
    lines = source.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert f"`python {path.name}`" in ast.get_docstring(ast.parse(source))
    for name in imported(source):
        pip = DISTRIBUTIONS.get(name, name)
        assert re.search(rf"pip install .*\b{pip}(==|<|\n| )", own), name
