"""Render the pages from the executed chapters, strictly, and run nothing."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml
from jupyter_cache.base import CacheBundleOut

from cdopt_tutorial.publish.chapter import claimed, read_chapter
from cdopt_tutorial.publish.execute import digest, find_result, fingerprint, open_cache
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.site import VERSION, add_site, edition, read_site

# jupyter-book has no `python -m`, and its script breaks when a venv is moved.
_BUILDER = "from jupyter_book.cli.main import main; main()"


class RenderError(Exception):
    """The pages could not be built cleanly; the message says what is wrong."""


def render(project: Project, *, device: str = "cpu") -> bool:
    """Build `_build/html` from the sources and the cached results.

    Where the pages will be published is read from the environment, by `read_site`.
    Every warning is an error. A build is always a full one: a page that is not
    read again does not repeat its warnings, so a second try would pass.

    Returns:
        True if the pages were built, False if they were up to date.

    Raises:
        RenderError: a chapter has no valid result, or the build was not clean.
        ValueError: an environment variable has a bad value.
    """
    config = _config(project, device)
    # The date at the foot of the pages alone makes none of them old.
    name = fingerprint(project.root, _sources(project), (config, VERSION))
    stamp, index = project.build / "render.stamp", project.html / "index.html"
    if stamp.is_file() and stamp.read_text() == name and index.is_file():
        return False
    print("rendering the pages", flush=True)
    stamp.unlink(missing_ok=True)
    for built in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(project.build / built, ignore_errors=True)
    theme = config["sphinx"]["config"].setdefault("html_theme_options", {})
    theme["extra_footer"] = edition(project.root)
    path = project.build / "config.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    _run_builder(project, path)
    stamp.write_text(name)
    return True


def _sources(project: Project) -> list[Path]:
    """Return the files that the pages are made from, besides the results."""
    root = project.root
    pages = [page for page in (root / "book").rglob("*") if page.is_file()]
    # Pages include parts of these.
    pages += [*root.glob("CONTRIBUTING.md"), *root.glob("tests/*.py")]
    files = [root / "_config.yml", root / "_toc.yml", *sorted(pages)]
    return files + project.chapters()


def _config(project: Project, device: str) -> dict:
    """Return the book's own configuration, and what holds for this build.

    That is where the results are, what a page may quote of them between double
    braces (the figures of all chapters, and the minutes that each took), and where
    the pages go.
    """
    site = read_site()
    config = yaml.safe_load((project.root / "_config.yml").read_text("utf-8"))
    figures, minutes = {}, {}
    for chapter, result in _results(project, device).items():
        figures |= claimed(result.nb)
        minutes[chapter.stem] = result.record.data["execution_seconds"] / 60
    quotes = {"figures": figures, "minutes": minutes}
    config.setdefault("parse", {})["myst_substitutions"] = quotes
    config["execute"] = {
        "execute_notebooks": "cache",
        "cache": str(project.results / digest(project, device)),
        "raise_on_error": True,
    }
    add_site(config, site)
    return config


def _results(project: Project, device: str) -> Mapping[Path, CacheBundleOut]:
    """Return the valid result of every chapter."""
    cache, results = open_cache(project, device), {}
    for chapter in project.chapters():
        results[chapter] = find_result(cache, read_chapter(chapter))
        if results[chapter] is None:
            name = project.relative(chapter)
            raise RenderError(
                f"{name} has no valid result: run `cdopt-tutorial execute {name}`"
            )
    return results


def _run_builder(project: Project, config: Path) -> None:
    """Run jupyter-book in its own process; print its steps, log all that it says."""
    root, log, lines = str(project.root), project.build / "render.log", []
    command = [sys.executable, "-c", _BUILDER, "build", root, "--path-output", root]
    command += ["--config", str(config), "--toc", str(project.root / "_toc.yml")]
    command += ["-W", "-n", "--keep-going"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=root, encoding="utf-8", **pipes) as process:
        for line in process.stdout:
            lines.append(re.sub(r"\x1b\[[0-9;]*[mK]", "", line).rstrip())
            step = re.match(r"(reading|writing) \w+\.{3} \[ *(\d+)%\] (\S+)", lines[-1])
            if step:
                print("  {} {:>3}% {}".format(*step.groups()), flush=True)
    log.write_text("\n".join(lines), "utf-8")
    # There is no cache-only mode: a chapter that was run here was run unchecked.
    bad = [s for s in lines if re.search(r"WARNING|ERROR|Executing notebook", s)]
    if bad or process.returncode:
        what = "\n".join(bad or ["jupyter-book failed:", *lines[-20:]])
        raise RenderError(
            f"the pages do not build cleanly:\n{what}\n"
            f"full log: {project.relative(log)}"
        )
