"""A chapter's notebook: its parameters, its programs, and the figures it computes."""

import ast
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, upgrade

# Prefix of the MIME type under which `show.glue` puts a figure into an output.
HIDDEN = "application/papermill.record/"
Figures = Mapping[str, float | str]  # that a chapter has glued, by name
_LINK = '<p class="program"><a href="../programs/{0}" download>Download {0}</a></p>'


def read(path: Path) -> NotebookNode:
    """Read a notebook, of an older format, too; a ValueError if it can't be read."""
    try:
        notebook = nbformat.read(path, 4)
        nbformat.validate(notebook)
        return upgrade(notebook)  # in older formats cells have no id
    except Exception as error:  # nbformat raises many types
        raise ValueError(f"{path}: it can't be read, or is no notebook") from error


def read_chapter(path: Path) -> NotebookNode:
    """Read a notebook without its outputs, or old figures would pass for new ones."""
    notebook = read(path)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells of code, in their order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(cell: NotebookNode, tag: str) -> bool:
    """Whether a cell has a tag."""
    return tag in cell.metadata.get("tags", [])


def program(cell: NotebookNode) -> tuple[str, str] | None:
    """Return the file name and the text of a bare program; None of another cell."""
    written = re.match(r"%%writefile ([\w.-]+)\n(.*)", cell.source, re.DOTALL)
    if written and tagged(cell, "bare"):
        return written[1], written[2].rstrip("\n") + "\n"
    return None


def programs(notebook: NotebookNode) -> dict[str, str]:
    """Return the bare programs of a chapter by file name."""
    return dict(filter(None, map(program, code_cells(notebook))))


def with_outputs(chapter: NotebookNode, ran: NotebookNode) -> NotebookNode:
    """Turn a chapter, in place, into its page, with the outputs of a run; return it."""
    for cell, done in zip(code_cells(chapter), code_cells(ran), strict=True):
        cell.outputs, cell.execution_count = done.outputs, done.execution_count
        cell.source = cell.source.replace("  # fmt: skip", "")  # for the formatter only
    cells, chapter.cells = chapter.cells, []
    for cell in cells:
        chapter.cells.append(cell)
        if written := program(cell):
            chapter.cells.append(new_markdown_cell(_LINK.format(written[0])))
    # A kernel sets this as it starts, but may have failed to; `!ls` needs it.
    chapter.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    return chapter


def shortened(notebook: NotebookNode) -> NotebookNode:
    """Return a copy with the parameters of its short profile, from its metadata.

    They end the cell tagged `parameters`; the copy's metadata have `shortened` then.
    """
    short = deepcopy(notebook)
    values = notebook.metadata.get("cdopt_tutorial", {}).get("short", {})
    for cell in code_cells(short):
        if values and tagged(cell, "parameters"):
            lines = [f"{name} = {value!r}" for name, value in values.items()]
            cell.source = "\n".join([cell.source, *lines])
            short.metadata["shortened"] = True
    return short


def claimed(notebook: NotebookNode) -> Figures:
    """Return the figures that a notebook has glued, as far as it ran."""
    figures: dict[str, float | str] = {}
    for cell in code_cells(notebook):
        for out in cell.outputs:
            if text := out.get("data", {}).get(f"{HIDDEN}text/plain"):
                read = float if text in ("nan", "inf", "-inf") else ast.literal_eval
                figures[out.metadata["scrapbook"]["name"]] = read(text)
    return figures
