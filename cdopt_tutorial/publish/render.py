"""Render the pages from the executed chapters, strictly, and run nothing."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from cdopt_tutorial.publish.execute import (
    digest,
    find_result,
    open_cache,
    read_chapter,
)
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.quotes import quotes
from cdopt_tutorial.publish.site import (
    Site,
    add_edition,
    add_site,
    package_version,
    read_site,
)

_BUILDER = "from jupyter_book.cli.main import main; main()"
"""jupyter-book has no `python -m`, and its script breaks when a venv is moved."""


class RenderError(Exception):
    """The pages could not be built cleanly; the message says what is wrong."""


def render(project: Project, *, device: str = "cpu") -> bool:
    """Build `_build/html` from the sources and the cached results.

    Called by the command `build` and by the tests of the pages.
    Where the pages will be published is read from the environment, by `read_site`.
    Every warning is an error. A build is always a full one: a page that is not
    read again does not repeat its warnings, so a second try would pass.

    Returns:
        True if the pages were built, False if they were up to date.

    Raises:
        RenderError: a chapter has no valid result, or the build was not clean.
        ValueError: an environment variable has a bad value.
    """
    site = read_site()
    stamp = project.build / "render.stamp"
    fingerprint = _fingerprint(project, device, site)
    index = project.html / "index.html"
    if stamp.is_file() and stamp.read_text() == fingerprint and index.is_file():
        return False
    config = _write_config(project, device, site)
    print("rendering the pages", flush=True)
    stamp.unlink(missing_ok=True)
    for built in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(project.build / built, ignore_errors=True)
    _run_builder(project, config)
    stamp.write_text(fingerprint)
    return True


def _fingerprint(project: Project, device: str, site: Site) -> str:
    """Return the name of all that decides the pages, but for their date."""
    parts = [project.root, digest(project, device), site, package_version()]
    sha = hashlib.sha256(f"{parts}\n".encode())
    cache = open_cache(project, device)
    pages = (p for p in (project.root / "book").rglob("*") if p.is_file())
    # Pages include parts of these.
    included = [*project.root.glob("CONTRIBUTING.md"), *project.root.glob("tests/*.py")]
    sources = [project.root / "_config.yml", project.root / "_toc.yml"]
    for file in [*sources, *sorted(pages), *sorted(included), *project.chapters()]:
        sha.update(f"{file.relative_to(project.root)}\n".encode())
        sha.update(file.read_bytes())
    for chapter in project.chapters():
        result = find_result(cache, read_chapter(chapter))
        if result is None:
            name = project.relative(chapter)
            raise RenderError(
                f"{name} has no valid result: run `cdopt-tutorial execute {name}`"
            )
        sha.update(f"{result.record.hashkey} {result.record.created}".encode())
    return sha.hexdigest()


def _write_config(project: Project, device: str, site: Site) -> Path:
    """Write the build's configuration: the book's own, and what holds for this build.

    That is where the results are and what they gave, where the pages go, and which
    edition they are.
    """
    config = yaml.safe_load((project.root / "_config.yml").read_text("utf-8"))
    cache = project.results / digest(project, device)
    config["execute"] = {
        "execute_notebooks": "cache",
        "cache": str(cache),
        "raise_on_error": True,
    }
    config.setdefault("parse", {})["myst_substitutions"] = quotes(project, device)
    add_site(config, site)
    add_edition(config, project.root)
    path = project.build / "config.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return path


def _run_builder(project: Project, config: Path) -> None:
    """Run jupyter-book in its own process; print its steps, log all that it says."""
    command = [sys.executable, "-c", _BUILDER, "build", str(project.root)]
    command += ["--path-output", str(project.root), "--config", str(config)]
    command += ["--toc", str(project.root / "_toc.yml"), "-W", "-n", "--keep-going"]
    lines = []
    log = project.build / "render.log"
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            cwd=project.root,
            text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        for line in process.stdout:
            line = re.sub(r"\x1b\[[0-9;]*[mK]", "", line)
            lines.append(line.rstrip())
            file.write(line)
            if step := re.match(r"(reading|writing) \w+\.{3} \[ *(\d+)%\] (\S+)", line):
                print("  {} {:>3}% {}".format(*step.groups()), flush=True)
    problem = _problem(lines, process.returncode)
    if problem:
        raise RenderError(f"{problem}\nfull log: {project.relative(log)}")


def _problem(lines: list[str], returncode: int) -> str | None:
    """Return what the builder's log complains of, or None if the build was clean."""
    # There is no cache-only mode: a chapter that was run here was run unchecked.
    bad = [s for s in lines if re.search(r"WARNING|ERROR|Executing notebook", s)]
    if bad:
        return "the pages do not build cleanly:\n" + "\n".join(bad)
    if returncode:
        return "jupyter-book failed:\n" + "\n".join(lines[-20:])
    return None
