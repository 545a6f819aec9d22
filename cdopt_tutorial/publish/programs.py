"""The bare programs of the chapters as files, each behind a link where it stands.

An extension of Sphinx; `render` has the files written, and copied beside the pages.
"""

import shutil
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes

from cdopt_tutorial.publish.chapter import tagged
from cdopt_tutorial.publish.project import Project

FOLDER = "programs"  # among the pages
_MAGIC = "%%writefile "


def read_programs(project: Project) -> dict[str, str]:
    """Return the text of each program by the name of its file, in order of chapters."""
    found = {}
    for path in project.chapters():
        for cell in nbformat.read(path, as_version=4).cells:
            if tagged(cell, "bare"):
                first, _, text = cell.source.partition("\n")
                found[first.removeprefix(_MAGIC)] = text.rstrip("\n") + "\n"
    return found


def write_programs(project: Project) -> Path:
    """Write all programs; return the folder to copy beside the pages."""
    folder = project.build / "extra" / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in read_programs(project).items():
        (folder / name).write_text(text, "utf-8")
    return folder.parent


def setup(app: Any) -> None:
    """Have Sphinx, which calls this once, link the files before it writes a page."""
    app.connect("doctree-resolved", _link)


def _link(app: Any, page: nodes.document, name: str) -> None:
    """Put a link below each cell of a chapter that writes a bare program, in place."""
    for cell in list(page.findall(nodes.container)):
        if "tag_bare" in cell["classes"]:
            first = next(cell.findall(nodes.literal_block)).astext().splitlines()[0]
            file, up = first.removeprefix(_MAGIC), "../" * name.count("/")
            link = f'<a href="{up}{FOLDER}/{file}" download>Download {file}</a>'
            link = nodes.raw("", f'<p class="program">{link}</p>', format="html")
            cell.parent.insert(cell.parent.index(cell) + 1, link)
