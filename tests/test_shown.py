"""Code that pages show: in chapters it is the package's, on the page of layers it runs.

A block of Python in a markdown cell, whose first line is a comment with the path of a
file of the package, shows definitions of that file: functions, classes, assignments.
Lines may break elsewhere, and comments differ. Docstrings are left out, and members of
a class may be, if `...` stands among those that are shown.
"""

import ast
import re

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
    given, shown = (definitions(ast.parse(text).body) for text in (source, block))
    said = []
    for name, code in shown.items():
        if not name.endswith("...") and code != given.get(name):
            said.append(f"{name} is not in the file, or not like that")
        if code.startswith("ClassDef("):
            lacks = any(n.startswith(f"{name}.") for n in given.keys() - shown.keys())
            if lacks != (f"{name}...." in shown):
                said.append(f"{name} needs `...` where something is left out, only")
    return said


def definitions(body: list[ast.stmt], owner: str = "") -> dict[str, str]:
    """The code of what is defined, by its name: of a class, without its members.

    Without docstrings; what is no definition has its code for a name.
    """
    code = {}
    for node in body:
        name = owner + ast.unparse(node)
        match node:
            case ast.Expr(ast.Constant(value)) if value is not ...:
                continue  # a docstring
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                name = owner + node.name
                node.body = node.body[ast.get_docstring(node) is not None :]
            case ast.ClassDef():
                name = owner + node.name
                code |= definitions(node.body, f"{name}.")
                node.body = []
            case ast.Assign([ast.Name(target)]) | ast.AnnAssign(ast.Name(target)):
                name = owner + target
        code[name] = ast.dump(node)
    return code


@pytest.mark.parametrize("path, code", SHOWN)
def test_what_is_shown_is_the_packages_short_and_narrow(path, code):
    assert complaints(code, (ROOT / path).read_text("utf-8")) == []
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
