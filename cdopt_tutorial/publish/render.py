"""Render the pages from the chapters' results, strictly; no chapter is run."""

import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import yaml
from sphinx_external_toc.parsing import parse_toc_yaml

from cdopt_tutorial.publish import chapter, markdown
from cdopt_tutorial.publish.execute import (
    end_with_parent,
    find_result,
    fingerprint,
    read_failed,
)
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.quotes import Quotes
from cdopt_tutorial.publish.reference import Reference
from cdopt_tutorial.publish.site import VERSION, add_site, read_site

# jupyter-book has no `python -m`, and its script breaks when a venv is moved.
_BUILDER = "from jupyter_book.cli.main import main; main()"
# What pages are made from besides the results.
_SOURCES = "_*.yml CONTRIBUTING.md tests/*.py notebooks/*.ipynb book/**/*".split()


class RenderError(Exception):
    """The pages could not be built cleanly; the message says what is wrong."""


def render(project: Project, *, device: str = "cpu", short: bool = False) -> bool:
    """Build `_build/html` from the sources and the cached results.

    Returns False if the pages were up to date; raises RenderError at a warning, and see
    `read_site`. Every build is a full one, as a page that is not read again does not
    repeat its warnings. A chapter without a valid result is shown as far as it ran, and
    is never up to date; with `short` a result of its short profile is valid, too.
    """
    all_ran = _write_pages(project, device, short)
    config = yaml.safe_load((project.root / "_config.yml").read_text("utf-8"))
    sphinx = config["sphinx"]["config"]
    sphinx["html_extra_path"] = [str(project.extra)]
    sphinx["written_pages"] = str(project.pages)
    add_site(config, read_site())
    found = {f for each in _SOURCES for f in project.root.glob(each) if f.is_file()}
    found |= {file for file in project.pages.rglob("*.*")}
    # Without the date in the footer, which alone makes no page out of date.
    name = fingerprint(project.root, sorted(found), (config, VERSION))
    stamp = project.build / "render.stamp"
    index = project.html / "index.html"
    if index.exists() and stamp.exists() and stamp.read_text("utf-8") == name:
        return False
    print("rendering the pages", flush=True)
    stamp.unlink(missing_ok=True)
    for built in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(project.build / built, ignore_errors=True)
    theme = sphinx.setdefault("html_theme_options", {})
    theme["extra_footer"] = f"Version {VERSION}, {datetime.now(UTC).date()}"
    path = project.build / "config.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    run_builder(project, config=path)
    if all_ran:
        stamp.write_text(name, "utf-8")
    return True


def _write_pages(project: Project, device: str, short: bool) -> bool:
    """Write what Sphinx reads, and programs; return whether all chapters ran."""
    for folder in (project.pages, project.extra / "programs"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    quotes, chapters = _read_runs(project, device, short)
    pages = {}
    for name in dict.fromkeys([*parse_toc_yaml(project.root / "_toc.yml"), *chapters]):
        if notebook := chapters.get(name):
            prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
            texts = quotes.fill_in(name, [cell.source for cell in prose])
            for cell, text in zip(prose, texts, strict=True):
                cell.source = text
            file, text = project.pages / f"{name}.ipynb", nbformat.writes(notebook)
        else:
            text = (project.root / f"{name}.md").read_text("utf-8")
            file, (text,) = project.pages / f"{name}.md", quotes.fill_in(name, [text])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
        pages[name] = notebook or text
    markdown.write(project.extra, pages)
    return not quotes.failed


def _read_runs(project: Project, device: str, short: bool) -> tuple[Quotes, dict]:
    """Return what pages quote, and chapters with outputs by name; write programs."""
    reference, figures, moved, failed, chapters = Reference(project), {}, {}, {}, {}
    for path in project.chapters():
        notebook, name = chapter.read_chapter(path), f"notebooks/{path.stem}"
        if ran := find_result(project, notebook, device, short=short):
            figures[f"{path.stem[:2]}-minutes"] = ran.metadata["seconds"] / 60
        else:
            ran = read_failed(project, path)
            failed[name] = ran.metadata.get("failed", "There is no result.")
        claimed = chapter.claimed(ran)
        figures |= claimed
        if not chapter.is_injected(ran):
            moved |= reference.drift(path.stem, claimed, complete=False)
        for file, text in chapter.programs(notebook).items():
            (project.extra / "programs" / file).write_text(text, "utf-8")
        chapters[name] = chapter.with_outputs(notebook, ran)
    return Quotes(figures, moved, failed, {*reference.absent()}), chapters


def run_builder(
    project: Project, *, config: Path, builder: str = "html", strict: bool = True
) -> None:
    """Run jupyter-book in its own process; `_build/render.log` has its output."""
    root, log = project.root, project.build / "render.log"
    above = project.build.parent  # to which jupyter-book adds `_build`
    # -P: import the package, not a folder of its name in the book.
    command = [sys.executable, "-P", "-c", _BUILDER, "build", root, "--keep-going"]
    command += ["--path-output", above, "--config", config, "--builder", builder]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    how |= {"cwd": root, "encoding": "utf-8", "preexec_fn": end_with_parent}
    done = subprocess.run(command + ["-W", "-n"] * strict, **how)
    output = re.sub(r"\x1b\[[0-9;]*[mK]", "", done.stdout)
    log.write_text(output, "utf-8")
    bad = [line for line in output.splitlines() if re.search(r"WARNING|ERROR", line)]
    if (strict and bad) or done.returncode:
        what = ["the pages do not build cleanly:"]
        what += bad or ["jupyter-book failed:", *output.splitlines()[-20:]]
        raise RenderError("\n".join([*what, f"full log: {project.relative(log)}"]))
