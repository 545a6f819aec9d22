"""Code that pages show: in chapters it is the package's, on the page of layers it runs.

A block of Python in a markdown cell, whose first line is a comment with the path of a
file of the package, shows definitions of that file: functions, classes, assignments.
Lines may break elsewhere, and comments differ. Docstrings are left out, and members of
a class may be, where `...` stands among those that are shown.
"""

import ast
import re

import pytest

from cdopt_tutorial.publish.chapter import read_chapter
from cdopt_tutorial.publish.project import this_project

COLUMNS, LINES = 78, 30  # as wide as a cell of code, and no longer than a function
BLOCK = re.compile(
    r"^```python\n# (cdopt_tutorial/[\w/]+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
ROOT = this_project().root
SHOWN = [
    block
    for chapter in this_project().chapters()
    for cell in read_chapter(chapter).cells
    for block in BLOCK.findall(cell.source)
]


def definitions(code: str) -> set[str]:
    """The code of what is defined, and of each member of a class below its head."""
    tree, found = ast.parse(code), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
    for node in tree.body:
        found.add(ast.unparse(node))
        if isinstance(node, ast.ClassDef):
            members, node.body = node.body, []
            head = ast.unparse(node)
            found |= {f"{head}\n{ast.unparse(member)}" for member in members}
    return found


@pytest.mark.parametrize("path, code", SHOWN, ids=[path for path, _ in SHOWN])
def test_what_is_shown_is_the_packages_short_and_narrow(path, code):
    given = definitions((ROOT / path).read_text("utf-8"))
    in_part = re.compile(r"^(    )?\.\.\.$", re.MULTILINE)
    for shown in definitions(code) - given:
        assert in_part.search(shown), f"{shown}\nis not in the file, or not like that"
    assert '"""' not in code
    assert len(code.splitlines()) <= LINES
    assert max(map(len, code.splitlines())) <= COLUMNS


def test_the_code_of_the_page_on_layers_runs_in_its_order(project):
    page = (project.root / "book/layers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    assert len(blocks) > 5
    exec(compile("\n".join(blocks), "book/layers.md", "exec"), {})


def test_each_test_that_a_text_names_is_there():
    sources = [*ROOT.glob("*.md"), *ROOT.glob("book/**/*.md")]
    sources += [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("cdopt_tutorial/**/*.py")]
    named = set()
    for source in sources:
        named |= set(re.findall(r"\btest_\w+\.py\b", source.read_text("utf-8")))
    assert len(named) > 10
    assert named <= {path.name for path in ROOT.glob("tests/*.py")}
