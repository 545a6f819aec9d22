"""What a chapter lets its reader choose, and how it is chosen from outside.

The names are those of the cell tagged `parameters`, the values those that papermill
would put there: in a cell of their own behind it, tagged `injected-parameters`.
"""

import ast
from collections.abc import Mapping

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

_OURS = "injected-parameters"


def parameters(notebook: NotebookNode) -> list[str]:
    """Return the names that the chapter's cell of parameters sets, in its order.

    Raises:
        ValueError: the notebook has no such cell, or more than one, or it is no
            plain Python.
    """
    cell = notebook.cells[_place(notebook)]
    try:
        nodes = ast.walk(ast.parse(cell.source))
    except SyntaxError as error:
        raise ValueError(
            f"the cell of parameters is no plain Python: {error}"
        ) from None
    names = (n for n in nodes if isinstance(n, ast.Name))
    return [name.id for name in names if isinstance(name.ctx, ast.Store)]


def inject(notebook: NotebookNode, values: Mapping[str, object]) -> NotebookNode:
    """Set parameters of a notebook, in place, and return it.

    Called by `execute` before a chapter runs. Without values nothing is changed.

    Args:
        notebook: a chapter.
        values: for each name, a value whose `repr` is a Python literal.

    Raises:
        ValueError: the chapter has no parameter of such a name; see `parameters`.
    """
    if not values:
        return notebook
    known = parameters(notebook)
    for name in values:
        if name not in known:
            raise ValueError(f"no parameter {name!r}; there are: {', '.join(known)}")
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    cell = new_code_cell("\n".join(["# Set from outside:", *lines]))
    cell.metadata["tags"] = [_OURS]
    # What was set from outside before is overruled, as papermill does it.
    notebook.cells = [each for each in notebook.cells if _OURS not in _tags(each)]
    notebook.cells.insert(_place(notebook) + 1, cell)
    return notebook


def read_value(text: str) -> object:
    """Return the Python literal that `text` writes, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _place(notebook: NotebookNode) -> int:
    """Return the index of the cell of parameters."""
    cells = enumerate(notebook.cells)
    found = [index for index, cell in cells if "parameters" in _tags(cell)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} cells are tagged `parameters`, not one")
    return found[0]


def _tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])
