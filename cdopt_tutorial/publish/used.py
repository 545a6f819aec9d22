"""Which of the package's files a chapter uses, found without running it."""

import re
from pathlib import Path

from nbformat import NotebookNode

from cdopt_tutorial.publish.chapter import code_cells

# Suffixes of data that modules read from their own folder.
_DATA = (".json", ".mplstyle", ".svg")
# A module, and what is imported from it; ruff's rules forbid relative imports.
_NAMED = re.compile(r"\bcdopt_tutorial((?:\.\w+)*)(?: import (\([^)]*\)|.*))?")
_COMMAND = re.compile(r"-m cdopt_tutorial (\w+)")


def used_files(package: Path, notebook: NotebookNode) -> list[Path]:
    """Return the files that a chapter imports, directly or not, and their data.

    Imports within functions count, and so do modules named in a string, such as the
    module of another process, or a command after ``-m``.
    """
    new = _modules(package, "\n".join(cell.source for cell in code_cells(notebook)))
    found: set[Path] = set()
    while new:
        found |= new
        new = set().union(*(_modules(package, f.read_text()) for f in new)) - found
    folders = {file.parent for file in found}
    data = {f for each in folders for f in each.iterdir() if f.suffix in _DATA}
    return sorted(found | data)


def _modules(package: Path, code: str) -> set[Path]:
    """The modules that code names, each with its parent packages."""
    names = []
    for module, imported in _NAMED.findall(code):
        names += [module]
        names += [f"{module}.{each}" for each in re.findall(r"\w+", imported)]
    for command in _COMMAND.findall(code):
        names += [".__main__", f".commands.{command}"]
    found = set()
    for name in names:
        parts = name.split(".")[1:]
        for place in (package.joinpath(*parts[:n]) for n in range(len(parts) + 1)):
            found |= {place.with_suffix(".py"), place / "__init__.py"}
    return {file for file in found if file.is_file()}
