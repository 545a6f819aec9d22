"""Render the pages from the chapters' results, strictly; no chapter is run."""

import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import nbformat
import yaml

from cdopt_tutorial.publish import chapter
from cdopt_tutorial.publish.config import read_config
from cdopt_tutorial.publish.execute import (
    end_with_parent,
    find_result,
    fingerprint,
)
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference

VERSION = version("cdopt-tutorial")
# jupyter-book has no `python -m`, and its script breaks when a venv is moved.
_BUILDER = "from jupyter_book.cli.main import main; main()"
# What pages are made from besides the results.
_SOURCES = "_*.yml CONTRIBUTING.md tests/*.py notebooks/[!.]* book/**/*".split()
_SOURCES.append("cdopt_tutorial/**/*.py")  # whose docstrings are the reference


class RenderError(Exception):
    """The pages could not be built cleanly; the message says what is wrong."""


def render(project: Project, *, device: str = "cpu", short: bool = False) -> bool:
    """Build `_build/html` from the sources and the cached results.

    Returns False if the pages were up to date; raises RenderError at a warning, and see
    `read_config`. Every build is a full one, as a page that is not read again does not
    repeat its warnings. A chapter without a valid result is shown as far as it ran, and
    is never up to date; with `short` a result of its short profile is valid, too.
    """
    config = read_config(project)
    sphinx = config["sphinx"]["config"]
    sphinx["runs"] = _read_runs(project, device, short)
    sphinx["html_extra_path"] = [str(project.pages / "extra")]
    sources = {file for each in _SOURCES for file in project.root.glob(each)}
    sources |= {*project.pages.rglob("*")}
    files = sorted(file for file in sources if file.is_file())
    # Without the date in the footer, which alone makes no page out of date.
    name = fingerprint(project.root, files, (config, VERSION))
    stamp, index = project.build / "render.stamp", project.html / "index.html"
    if index.exists() and stamp.exists() and stamp.read_text("utf-8") == name:
        return False
    print("rendering the pages", flush=True)
    stamp.unlink(missing_ok=True)
    for built in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(project.build / built, ignore_errors=True)
    theme = sphinx.setdefault("html_theme_options", {})
    theme["extra_footer"] = f"Version {VERSION}, {datetime.now(UTC).date()}"
    run_builder(project, config)
    if not sphinx["runs"]["failed"]:
        stamp.write_text(name, "utf-8")
    return True


def _read_runs(project: Project, device: str, short: bool) -> dict[str, Any]:
    """Write the chapters with their outputs, and their programs, for Sphinx.

    Returns what pages may quote and must note, as `pages` has it.
    """
    reference, programs = Reference(project), project.pages / "extra/programs"
    runs: dict[str, Any] = {"figures": {}, "moved": {}, "failed": {}}
    shutil.rmtree(project.pages, ignore_errors=True)
    programs.mkdir(parents=True)
    (project.pages / "notebooks").mkdir()
    for path in project.chapters():
        name, number = f"notebooks/{path.stem}", path.stem.partition("_")[0]
        notebook = chapter.read_chapter(path)
        ran = find_result(project, notebook, device, short=short) or notebook
        if "seconds" not in ran.metadata:
            runs["failed"][name] = "There is no result."
        elif "failed" in ran.metadata:
            runs["failed"][name] = ran.metadata["failed"]
        else:
            runs["figures"][f"{number}-minutes"] = ran.metadata["seconds"] / 60
        claimed = chapter.claimed(ran).items()
        figures = {n: v for n, v in claimed if n.startswith(f"{number}-")}  # its own
        runs["figures"] |= figures
        if not ran.metadata.get("injected"):
            runs["moved"] |= reference.drift(path.stem, figures, complete=False)
        for file, text in chapter.programs(notebook).items():
            (programs / file).write_text(text, "utf-8")
        page = nbformat.writes(chapter.with_outputs(notebook, ran))
        (project.pages / f"{name}.ipynb").write_text(page, "utf-8")
    return runs | {"absent": reference.absent()}


def run_builder(project: Project, config: dict[str, Any]) -> None:
    """Run jupyter-book in its own process; `_build/render.log` has its output."""
    root, log = str(project.root), project.build / "render.log"
    path = project.build / "config.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    above = str(project.build.parent)  # to which jupyter-book adds `_build`
    # -P: import the package, not a folder of its name in the book.
    command = [sys.executable, "-P", "-c", _BUILDER, "build", root, "--keep-going"]
    command += ["--path-output", above, "--config", str(path), "-W", "-n"]
    done = subprocess.run(
        command, cwd=root, preexec_fn=end_with_parent, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output = re.sub(r"\x1b\[[0-9;]*[mK]", "", done.stdout)
    log.write_text(output, "utf-8")
    if done.returncode:
        lines = output.splitlines()
        bad = [line for line in lines if "WARNING" in line or "ERROR" in line]
        what = ["the pages do not build cleanly:", *(bad or lines[-20:])]
        raise RenderError("\n".join([*what, f"full log: {project.relative(log)}"]))
