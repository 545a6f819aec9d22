"""The figures that a chapter claims: how its run keeps them, and how they are found."""

import ast

from nbformat import NotebookNode

HIDDEN = "application/papermill.record/"
"""How the type begins under which an output carries a figure; `show.glue` writes it."""

Value = float | int | str
"""What a figure may be."""


def claimed(notebook: NotebookNode) -> dict[str, Value]:
    """Return the figures that a notebook has glued, as far as it ran, by their names.

    Called by `execute`, and by `quotes` for the pages.
    """
    record = f"{HIDDEN}text/plain"
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return {
        out.metadata["scrapbook"]["name"]: _value(out.data[record])
        for out in outputs
        if record in out.get("data", {})
    }


def _value(text: str) -> Value:
    """Return the value that `glue` wrote; what is no literal stays a text."""
    for read in (ast.literal_eval, float):  # `nan` and `inf` are no literals
        try:
            return read(text)
        except (SyntaxError, ValueError):
            continue
    return text
