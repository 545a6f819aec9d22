"""Small books, for tests of running and rendering chapters."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import nbformat
import yaml
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from cdopt_tutorial.publish.chapter import HIDDEN, code_cells
from cdopt_tutorial.publish.execute import execute
from cdopt_tutorial.publish.project import Project

KERNEL = {
    "kernelspec": {"name": "python3", "display_name": "Python 3"},
    "language_info": {"name": "python"},
}


def write_chapter(
    project: Project,
    *code: str,
    prose: str = "# A chapter",
    name: str = "01_a",
    short: dict | None = None,
) -> Path:
    """Write a notebook with a cell of prose and cells of code; return its path.

    With a `short` profile the first cell of code has the parameters.
    """
    cells = [new_markdown_cell(prose), *map(new_code_cell, code)]
    if short:
        cells[1].metadata["tags"] = ["parameters"]
    for cell in cells:
        if cell.source.startswith("%%writefile"):
            cell.metadata["tags"] = ["bare"]
    path = project.root / "notebooks" / f"{name}.ipynb"
    metadata = KERNEL | {"cdopt_tutorial": {"short": short or {}}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def run(
    project: Project, *paths: Path, short: bool = False, force: bool = False
) -> list[NotebookNode]:
    """Execute chapters, all of them by default."""
    project.short = short
    return execute(project, paths or project.chapters(), force=force)


def glued(name: str, value: object) -> NotebookNode:
    """The output of a cell that glues a figure."""
    data = {f"{HIDDEN}text/plain": repr(value)}
    about = {"name": name, "mime_prefix": HIDDEN}
    return new_output("display_data", data, metadata={"scrapbook": about})


def run_plainly(notebook: NotebookNode, on_cell, *_) -> None:
    """Run cells here rather than in a kernel; ``glue`` shows a figure."""
    names = {}
    for cell in code_cells(notebook):
        if cell.source.startswith("%%"):
            continue
        on_cell(cell, notebook.cells.index(cell))

        def glue(name, value, outputs=cell.outputs):
            outputs.append(glued(name, value))

        with redirect_stdout(io.StringIO()) as said:
            try:
                names["glue"] = glue
                exec(cell.source, names)
            except Exception as error:
                about = {"ename": type(error).__name__, "evalue": f"{error}"}
                trace = [f"Traceback\n{about['ename']}: {error}"]
                cell.outputs.append(new_output("error", traceback=trace, **about))
                raise CellExecutionError(*trace, *about.values()) from None
            finally:
                if said.getvalue():
                    cell.outputs.append(new_output("stream", text=said.getvalue()))


def write_contents(project: Project, config: dict, *others: str) -> None:
    """Write the configuration, and a table of contents with 01_a and others."""
    (project.root / "_config.yml").write_text(yaml.safe_dump(config))
    toc = {"format": "jb-book", "root": "book/index"}
    toc["chapters"] = [{"file": file} for file in ("notebooks/01_a", *others)]
    (project.root / "_toc.yml").write_text(yaml.safe_dump(toc, sort_keys=False))


def smallest_book(root: Path) -> Project:
    """Make a book of a front page and one chapter, which has not been run."""
    project = Project(root)
    for folder in ("cdopt_tutorial", "book", "notebooks"):
        (root / folder).mkdir(parents=True)
    for name in ("constraints.txt", "notebooks/reference.toml"):
        (root / name).touch()
    extensions = ["myst_nb", "jupyter_book", "sphinx_comments", "sphinx_external_toc"]
    extensions.append("cdopt_tutorial.publish.render")
    config = {"title": "A book", "sphinx": {"config": {"extensions": extensions}}}
    config["execute"] = {"execute_notebooks": "off"}
    write_contents(project, config)
    (root / "book/index.md").write_text("# Front\n\n[](/notebooks/01_a.ipynb)\n")
    write_chapter(project, "print(6 * 7)")
    return project
