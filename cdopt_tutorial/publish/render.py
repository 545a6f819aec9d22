"""Render the pages from the chapters' results, strictly; no chapter is run."""

import os
import shutil
import subprocess
import sys
from copy import deepcopy
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import nbformat
import yaml
from jsonschema import validate
from jupyter_book.config import get_validator
from sphinx_external_toc.parsing import parse_toc_yaml

from cdopt_tutorial.publish import chapter
from cdopt_tutorial.publish.execute import end_with_parent, find_result
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference

VERSION = version("cdopt-tutorial")
# jupyter-book has no `python -m`, and its script breaks when a venv is moved.
_BUILDER = "from jupyter_book.cli.main import main; main()"


def read_config(project: Project) -> dict[str, Any]:
    """Return what `_config.yml` and the environment say, for jupyter-book.

    A ValueError names a file that can't be read.
    """
    file = "_toc.yml"
    try:
        parse_toc_yaml(project.root / file)
        file = "_config.yml"
        config = yaml.safe_load((project.root / file).read_text("utf-8"))
        _add_site(config)
        # jupyter-book itself would ignore a key that it does not know.
        known = deepcopy(get_validator().schema)
        for part in (known, *known["properties"].values()):
            part["additionalProperties"] = False
        validate(config, known)
    except Exception as error:  # each library has its own
        why = " ".join(str(getattr(error, "message", error)).split())
        raise ValueError(f"{file} can't be read: {why}") from error
    return config


def _add_site(config: dict[str, Any]) -> None:
    """Add, in place, what follows from where the book is published, if anywhere."""
    url = os.environ.get("CDOPT_TUTORIAL_URL", "").rstrip("/")
    place = os.environ.get("CDOPT_TUTORIAL_REPOSITORY", "").rstrip("/")
    sphinx, published = config["sphinx"]["config"], config.pop("published", {})
    options = config.pop("repository_options", {})
    if url:
        sphinx["extensions"] += published.pop("extensions", [])
        sphinx |= published | {"html_baseurl": f"{url}/", "ogp_site_url": f"{url}/"}
        # It is shown at any depth.
        sphinx["notfound_urls_prefix"] = f"{urlsplit(url).path}/"
    if place:
        sphinx["html_theme_options"] |= options | {"repository_url": place}


def render(project: Project, *, device: str = "cpu", short: bool = False) -> bool:
    """Build `_build/html` from the sources and the cached results.

    Returns False if there were warnings, which are printed; raises what `read_config`
    does. Every build is a full one, as a page that is not read again does not repeat
    its warnings. A chapter without a valid result is shown as far as it ran; with
    `short` a result of its short profile is valid, too.
    """
    config, file = read_config(project), project.build / "config.yml"
    sphinx = config["sphinx"]["config"]
    sphinx["runs"] = _read_runs(project, device, short)
    sphinx["html_extra_path"] = [str(project.pages / "extra")]
    theme = sphinx.setdefault("html_theme_options", {})
    theme["extra_footer"] = f"Version {VERSION}, {datetime.now(UTC).date()}"
    file.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    print("rendering the pages", flush=True)
    shutil.rmtree(project.html, ignore_errors=True)  # or pages that moved would stay
    # -P: import the package, not a folder of its name in the book.
    command = [sys.executable, "-P", "-c", _BUILDER, "build", str(project.root)]
    command += ["--path-output", str(project.build.parent)]  # to which it adds `_build`
    command += ["--config", str(file), "--all", "--keep-going", "-W", "-n"]
    done = subprocess.run(
        command, cwd=project.root, preexec_fn=end_with_parent, stdout=subprocess.DEVNULL
    )
    return done.returncode == 0


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
        moved = reference.drift(path.stem, ran) or {}
        runs["moved"] |= {n: how for n, how in moved.items() if n in figures}
        for file, text in chapter.programs(notebook).items():
            with (programs / file).open("x", encoding="utf-8") as program:
                program.write(text)
        page = nbformat.writes(chapter.with_outputs(notebook, ran))
        (project.pages / f"{name}.ipynb").write_text(page, "utf-8")
    return runs | {"absent": reference.absent}
