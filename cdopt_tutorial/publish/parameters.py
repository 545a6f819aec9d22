"""What a chapter lets its reader choose, and how it is chosen from outside.

The names are those of the cell tagged `parameters`, the values those that papermill
would put there: in a cell of their own behind it, tagged `injected-parameters`.
"""

import ast
from collections.abc import Mapping

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell


def parameters(notebook: NotebookNode) -> list[str]:
    """Return the names that the chapter's cell of parameters sets, in its order.

    Raises:
        ValueError: the notebook has no such cell, or more than one.
    """
    cell = notebook.cells[_place(notebook)]
    nodes = ast.walk(ast.parse(cell.source))
    targets = [node.targets for node in nodes if isinstance(node, ast.Assign)]
    return [name.id for (name,) in targets if isinstance(name, ast.Name)]


def inject(notebook: NotebookNode, values: Mapping[str, object]) -> NotebookNode:
    """Set parameters of a notebook, in place, and return it.

    Called by `execute` before a chapter runs. Without values nothing is changed.

    Args:
        notebook: a chapter.
        values: for each name, a value whose `repr` is a Python literal.

    Raises:
        ValueError: the chapter has no parameter of such a name.
    """
    if not values:
        return notebook
    known = parameters(notebook)
    for name in values:
        if name not in known:
            raise ValueError(f"no parameter {name!r}; there are: {', '.join(known)}")
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    cell = new_code_cell("\n".join(["# Set from outside:", *lines]))
    cell.metadata["tags"] = ["injected-parameters"]
    # Else each notebook would get a new random name, and no result be found again.
    cell.id = "injected-parameters"
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
    found = [
        index
        for index, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", [])
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} cells are tagged `parameters`, not one")
    return found[0]
