"""Render the pages from the executed chapters, strictly, and run nothing."""

import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import yaml

from cdopt_tutorial.publish import markdown
from cdopt_tutorial.publish.chapter import (
    claimed,
    is_injected,
    programs,
    read_chapter,
    with_outputs,
)
from cdopt_tutorial.publish.execute import (
    end_with_parent,
    find_result,
    fingerprint,
    read_failed,
)
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference
from cdopt_tutorial.publish.site import VERSION, add_site, read_site

# jupyter-book has no `python -m`, and its script breaks when a venv is moved.
_BUILDER = "from jupyter_book.cli.main import main; main()"


class RenderError(Exception):
    """The pages could not be built cleanly; the message says what is wrong."""


def render(project: Project, *, device: str = "cpu", short: bool = False) -> bool:
    """Build `_build/html` from the sources and the cached results.

    A build is a full one, or a second try would pass: a page that is not read again
    does not repeat its warnings. Returns False if the pages were up to date. Raises
    RenderError at a warning; see also `read_site`. A chapter that has no valid result
    is shown as far as it ran, and is never up to date; with `short` one of its short
    profile will do.
    """
    config = _config(project, device, short)
    files = [*_sources(project.root), *sorted(project.pages.iterdir())]
    # The date at the foot of the pages alone makes none of them old.
    name = fingerprint(project.root, files, (config, VERSION))
    stamp = project.build / "render.stamp"
    index = project.html / "index.html"
    if index.exists() and stamp.exists() and stamp.read_text("utf-8") == name:
        return False
    print("rendering the pages", flush=True)
    stamp.unlink(missing_ok=True)
    for built in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(project.build / built, ignore_errors=True)
    theme = config["sphinx"]["config"].setdefault("html_theme_options", {})
    theme["extra_footer"] = f"Version {VERSION}, {datetime.now(UTC).date()}"
    path = project.build / "config.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    run_builder(project, toc=project.root / "_toc.yml")
    if not config["sphinx"]["config"]["page_notes"]["failed"]:
        stamp.write_text(name, "utf-8")
    return True


def _sources(root: Path) -> list[Path]:
    """Return the files that pages are made from, or include, besides the results."""
    patterns = "_*.yml CONTRIBUTING.md tests/*.py notebooks/*.ipynb book/**/*".split()
    return sorted(f for each in patterns for f in root.glob(each) if f.is_file())


def _config(project: Project, device: str, short: bool) -> dict:
    """Return the book's configuration, with what pages may quote, and must note."""
    quotes, notes = _results(project, device, short)
    config = yaml.safe_load((project.root / "_config.yml").read_text("utf-8"))
    config.setdefault("parse", {})["myst_substitutions"] = quotes
    sphinx = config["sphinx"]["config"]
    sphinx["html_extra_path"] = [str(project.extra)]
    sphinx["page_notes"] = notes
    add_site(config, read_site())
    return config


def _results(project: Project, device: str, short: bool) -> tuple[dict, dict]:
    """Put chapters and programs where the pages find them; return quotes and notes."""
    reference = Reference(project)
    quotes = {"figures": {}, "minutes": {}}
    notes = {"failed": {}, "moved": {}, "absent": reference.absent()}
    notes["pages"] = str(project.pages)
    files = project.extra / "programs"
    for folder in (project.pages, files):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    chapters = {}
    for path in project.chapters():
        chapter, name = read_chapter(path), project.relative(path)
        if ran := find_result(project, chapter, device, short=short):
            quotes["minutes"][path.stem] = ran.metadata["seconds"] / 60
        else:
            ran = read_failed(project, path)
            why = ran.metadata.get("failed", "There is no result.")
            notes["failed"][str(name.with_suffix(""))] = why
        figures = claimed(ran)
        quotes["figures"] |= figures
        if not is_injected(ran):
            notes["moved"] |= reference.drift(path.stem, figures, complete=False)
        for file, text in programs(chapter).items():
            (files / file).write_text(text, "utf-8")
        shown = chapters[str(name.with_suffix(""))] = with_outputs(chapter, ran)
        nbformat.write(shown, project.pages / path.name)
    markdown.write(project.extra, project.root, chapters, quotes)
    return quotes, notes


def run_builder(
    project: Project, *, toc: Path, builder: str = "html", strict: bool = True
) -> None:
    """Run jupyter-book in its own process, with what `render` configured; log it."""
    root, log = project.root, project.build / "render.log"
    output = project.build.parent  # to which jupyter-book adds `_build`
    # -P: the package, and no folder of its name in the book, has the notes.
    command = [sys.executable, "-P", "-c", _BUILDER, "build", root]
    command += ["--path-output", output, "--config", project.build / "config.yml"]
    command += ["--toc", toc, "--builder", builder, "--keep-going"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    how |= {"cwd": root, "encoding": "utf-8", "preexec_fn": end_with_parent}
    done = subprocess.run(command + ["-W", "-n"] * strict, **how)
    said = re.sub(r"\x1b\[[0-9;]*[mK]", "", done.stdout)
    log.write_text(said, "utf-8")
    bad = [line for line in said.splitlines() if re.search(r"WARNING|ERROR", line)]
    if (strict and bad) or done.returncode:
        what = ["the pages do not build cleanly:"]
        what += bad or ["jupyter-book failed:", *said.splitlines()[-20:]]
        raise RenderError("\n".join([*what, f"full log: {project.relative(log)}"]))
