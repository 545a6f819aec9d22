"""Source code that chapters show in their prose is the package's.

A block of Python in a markdown cell, whose first line is a comment with the path of a
file of the package, shows definitions of that file: functions, classes, assignments.
Lines may break elsewhere, and comments differ. Docstrings may be left out, and members
of a class, if `...` stands among those that are shown.
"""

import ast
import re
from copy import deepcopy

import nbformat
import pytest

from cdopt_tutorial.publish.project import this_project

# As wide as a cell of code. A function fits a page, and a block is shorter, better.
COLUMNS = 78
LINES = 30
BLOCK = re.compile(
    r"^```python\n# (cdopt_tutorial/[\w/]+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks(notebook) -> list[tuple[str, str]]:
    """Path and code of each block that a notebook shows."""
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return [found for source in prose for found in BLOCK.findall(source)]


ROOT = this_project().root
SHOWN = [
    pytest.param(path, code, id=f"{chapter.stem}-{number}")
    for chapter in this_project().chapters()
    for number, (path, code) in enumerate(blocks(nbformat.read(chapter, as_version=4)))
]


def complaints(block: str, source: str) -> list[str]:
    """What a block says that its file does not, a line each."""
    shown, given = (definitions(ast.parse(text).body) for text in (block, source))
    said = []
    for name, node in shown.items():
        if name not in given:
            said.append(f"{name} is not in the file")
            continue
        code, doc = parts(given[name])
        if parts(node) not in ((code, doc), (code, None)):
            said.append(f"{name} is not as in the file")
        if isinstance(node, ast.ClassDef):
            lacks = any(n.startswith(f"{name}.") for n in given.keys() - shown.keys())
            if lacks != ("..." in map(ast.unparse, node.body)):
                said.append(f"{name} needs `...` where something is left out, only")
    return said


def definitions(body: list[ast.stmt], owner: str = "") -> dict[str, ast.stmt]:
    """What is defined, by its name; what is no definition has its code for one."""
    found = {}
    for node in body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                found[owner + name] = node
            case ast.ClassDef(name):
                found[owner + name] = node
                found |= definitions(node.body, f"{owner}{name}.")
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                found[owner + name] = node
            case ast.Expr(ast.Constant()):
                pass  # a docstring, or `...`
            case _:
                found[owner + ast.unparse(node)] = node
    return found


def parts(node: ast.stmt) -> tuple[str, str | None]:
    """The code, of a class without its members, and the docstring, if any."""
    node, doc = deepcopy(node), None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if (doc := ast.get_docstring(node)) is not None:
            del node.body[0]
            doc = " ".join(doc.split())
        if isinstance(node, ast.ClassDef):
            node.body = []
    return ast.dump(node), doc


@pytest.mark.parametrize("path, code", SHOWN)
def test_what_is_shown_is_the_package_s_short_and_narrow(path, code):
    assert complaints(code, (ROOT / path).read_text("utf-8")) == []
    assert len(code.splitlines()) <= LINES
    assert max(map(len, code.splitlines())) <= COLUMNS
