"""Source code that chapters show in their prose is the package's.

A block of Python in a markdown cell, whose first line is a comment with the path of a
file of the package, shows definitions of that file: functions, classes, assignments.
Lines may break elsewhere, and comments differ. Docstrings are left out, and members of
a class may be, if `...` stands among those that are shown.
"""

import ast
import re
from copy import deepcopy

import nbformat
import pytest

from cdopt_tutorial.publish.project import this_project

COLUMNS, LINES = 78, 30  # as wide as a cell of code, and no longer than a function
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
    given = definitions(ast.parse(source).body)
    shown = definitions(ast.parse(block).body)
    said = []
    for name, node in shown.items():
        if name not in given or code_of(node) != code_of(given[name]):
            said.append(f"{name} is not in the file, or not like that")
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


def code_of(node: ast.stmt) -> str:
    """The code of a definition without its docstring; of a class, without members."""
    node = deepcopy(node)
    if isinstance(node, ast.ClassDef):
        node.body = []
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node.body = node.body[ast.get_docstring(node) is not None :]
    return ast.dump(node)


@pytest.mark.parametrize("path, code", SHOWN)
def test_what_is_shown_is_the_packages_short_and_narrow(path, code):
    assert complaints(code, (ROOT / path).read_text("utf-8")) == []
    assert '"""' not in code
    assert len(code.splitlines()) <= LINES
    assert max(map(len, code.splitlines())) <= COLUMNS
