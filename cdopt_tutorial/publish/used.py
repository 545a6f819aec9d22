"""Which files of the package a chapter uses, found without running it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

# What modules read that lie in the same folder.
_DATA = (".mplstyle", ".svg")


def used_files(package: Path, notebook: NotebookNode) -> list[Path]:
    """Return the files that a chapter imports, directly or not, and their data.

    Imports within functions count, and so do modules that a text names, such as one for
    another process, or a command after ``-m``. If a cell can't be read, it may use
    anything: all files.
    """
    cells = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    code = "\n".join(map(TransformerManager().transform_cell, cells))
    try:
        new = _modules(package, code)
    except SyntaxError:
        new = set(package.rglob("*.py"))
    found: set[Path] = set()
    while new:
        found |= new
        new = set().union(*(_modules(package, f.read_text()) for f in new)) - found
    folders = {file.parent for file in found}
    data = {f for each in folders for f in each.iterdir() if f.suffix in _DATA}
    return sorted(found | data)


def _modules(package: Path, code: str) -> set[Path]:
    """The modules that code names, each with the packages that it is in."""
    found = set()
    for name in _names(code, package.name):
        parts = name.split(".")[1:]
        for place in (package.joinpath(*parts[:n]) for n in range(len(parts) + 1)):
            found |= {place.with_suffix(".py"), place / "__init__.py"}
    return {file for file in found if file.is_file()}


@cache
def _names(code: str, package: str) -> frozenset[str]:
    """What code may import from a package, by dotted names, some of no module."""
    names = {name for node in ast.walk(ast.parse(code)) for name in _of(node, package)}
    return frozenset(n for n in names if f"{n}.".startswith(f"{package}."))


def _of(node: ast.AST, package: str) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (each.name for each in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield from (f"{module}.{each.name}" for each in names)
        case ast.Constant(value=str(text)):
            yield from re.findall(rf"\b{package}(?:\.\w+)+", text)
            for command in re.findall(rf"-m {package} (\w+)", text):
                yield from (f"{package}.__main__", f"{package}.commands.{command}")
