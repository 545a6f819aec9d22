"""Which of the package's files a chapter uses, found without running it."""

import re
from pathlib import Path

from nbformat import NotebookNode

from cdopt_tutorial.publish.chapter import code_cells

# A module, and what is imported from it; ruff's rules forbid relative imports.
_NAMED = re.compile(r"\bcdopt_tutorial((?:\.\w+)*)(?: import (\([^)]*\)|.*))?")
_COMMAND = re.compile(r"-m cdopt_tutorial (\w+)")


def used_files(package: Path, notebook: NotebookNode) -> list[Path]:
    """Return the files that a chapter imports, directly or not, and their data.

    Imports within functions count, and so do modules named in a string, such as the
    module of another process, or a command after ``-m``.
    """
    new = _modules(package, "\n".join(cell.source for cell in code_cells(notebook)))
    used: set[Path] = set()
    while new:
        used |= new
        new = set().union(*(_modules(package, f.read_text()) for f in new)) - used
    beside = {file for module in used for file in module.parent.iterdir()}
    data = {f for f in beside if f.suffix in (".json", ".mplstyle", ".svg")}
    return sorted(used | data)


def _modules(package: Path, code: str) -> set[Path]:
    """The modules that code names, each with its parent packages."""
    names = [f".commands.{command}" for command in _COMMAND.findall(code)]
    names += [".__main__"] if names else []
    for module, imported in _NAMED.findall(code):
        names.append(module)
        names += [f"{module}.{name}" for name in re.findall(r"\w+", imported)]
    modules = set()
    for name in names:
        parts = name.split(".")[1:]
        for place in (package.joinpath(*parts[:n]) for n in range(len(parts) + 1)):
            modules |= {place.with_suffix(".py"), place / "__init__.py"}
    return {file for file in modules if file.is_file()}
