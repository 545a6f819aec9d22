"""Render the pages from the chapters' results, strictly; no chapter is run.

For Sphinx this is an extension: a page quotes a figure of any chapter by the role
``glue:text``, with its name and, after a colon, its format; "NN-minutes" is how long
chapter NN took.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import yaml
from docutils import nodes
from jsonschema import validate
from jupyter_book.config import get_validator
from nbformat.v4 import new_markdown_cell
from sphinx.util.docutils import SphinxRole
from sphinx.util.logging import getLogger
from sphinx_external_toc.parsing import parse_toc_yaml

from cdopt_tutorial.publish import chapter
from cdopt_tutorial.publish.execute import end_with_parent, find_result
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference

# jupyter-book has no `python -m`, and its script breaks when a venv is moved.
_BUILDER = "from jupyter_book.cli.main import main; main()"
ABSENT = "(not measured)"  # a figure that was not reached, or lacks its library
# A cell above the title of a chapter that failed.
FAILED = """````{danger}
~~~text
%s
~~~
This chapter did not run through. What ran is shown below; a figure that was not reached
reads (not measured), on every page. Once it is mended, `cdopt-tutorial execute` with
its file runs it alone. What the error means is said under
[When something goes wrong](/book/errors.md).
````"""


def read_config(project: Project) -> dict[str, Any]:
    """Return what `_config.yml` and the environment say, for jupyter-book.

    A ValueError names a file that can't be read.
    """
    file = "_toc.yml"
    try:
        for page in parse_toc_yaml(project.root / file):
            if not list(project.root.glob(f"{page}.*")):
                raise ValueError(f"there is no {page}")
        file = "_config.yml"
        config = yaml.safe_load((project.root / file).read_text("utf-8"))
        sphinx, published = config["sphinx"]["config"], config.pop("published", {})
        options = config.pop("repository_options", {})
        if url := os.environ.get("CDOPT_TUTORIAL_URL", "").rstrip("/"):
            sphinx["extensions"] += published.pop("extensions")
            sphinx |= published | {"html_baseurl": f"{url}/", "ogp_site_url": f"{url}/"}
            sphinx["notfound_urls_prefix"] = f"{urlsplit(url).path}/"  # from any depth
        if place := os.environ.get("CDOPT_TUTORIAL_REPOSITORY", "").rstrip("/"):
            sphinx["html_theme_options"] |= options | {"repository_url": place}
        # jupyter-book itself would ignore a key that it does not know.
        schema = get_validator().schema
        for part in (schema, *schema["properties"].values()):
            part["additionalProperties"] = False
        validate(config, schema)
    except Exception as error:  # each library has its own
        why = " ".join(str(getattr(error, "message", error)).split())
        raise ValueError(f"{file} can't be read: {why}") from error
    return config


def render(project: Project) -> bool:
    """Build `_build/html` from the sources and the cached results.

    Returns False if there were warnings, which are printed; raises what `read_config`
    does. A chapter without a valid result is shown as far as it ran.
    """
    config, file = read_config(project), project.build / "config.yml"
    sphinx = config["sphinx"]["config"]
    sphinx["runs"] = _read_runs(project)
    sphinx["html_extra_path"] = [str(project.build / "pages/extra")]
    file.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    print("rendering the pages", flush=True)
    shutil.rmtree(project.html, ignore_errors=True)  # or pages that moved would stay
    # -P: import the package, not a folder of its name in the book.
    command = [sys.executable, "-P", "-c", _BUILDER, "build", str(project.root)]
    command += ["--path-output", str(project.build.parent)]  # to which it adds `_build`
    # All, since a page that is not read again does not repeat its warnings.
    command += ["--config", str(file), "--all", "--keep-going", "-W", "-n"]
    done = subprocess.run(
        command, cwd=project.root, preexec_fn=end_with_parent, stdout=subprocess.DEVNULL
    )
    return done.returncode == 0


def _read_runs(project: Project) -> dict[str, Any]:
    """Write the chapters with their outputs, and their programs, for Sphinx.

    Returns what pages may quote.
    """
    reference, pages = Reference(project), project.build / "pages"
    runs: dict[str, Any] = {"figures": {}, "moved": {}, "failed": False}
    shutil.rmtree(pages, ignore_errors=True)
    (pages / "notebooks").mkdir(parents=True)
    (programs := pages / "extra/programs").mkdir(parents=True)
    for path in project.chapters():
        notebook, number = chapter.read_chapter(path), path.stem.partition("_")[0]
        for file, text in chapter.programs(notebook).items():
            (programs / file).write_text(text, "utf-8")
        ran = find_result(project, notebook) or notebook
        page = chapter.with_outputs(notebook, ran)
        if "seconds" not in ran.metadata:
            ran.metadata["failed"] = "There is no result."
        if "failed" in ran.metadata:
            runs["failed"] = True
            page.cells.insert(0, new_markdown_cell(FAILED % ran.metadata["failed"]))
        else:
            runs["figures"][f"{number}-minutes"] = ran.metadata["seconds"] / 60
        figures = chapter.claimed(ran).items()  # and of them its own
        runs["figures"] |= {n: x for n, x in figures if n.startswith(f"{number}-")}
        moved = (reference.drift(path.stem, ran) or {}).items()
        runs["moved"] |= {n: how for n, how in moved if n.startswith(f"{number}-")}
        (pages / "notebooks" / path.name).write_text(nbformat.writes(page), "utf-8")
    return runs | {"absent": reference.absent}


def setup(app: Any) -> None:
    """Register the role and the chapters with Sphinx, which calls this once."""
    # From the runs: figures, and how some of them moved, by name; those whose library
    # is not installed; whether a chapter failed.
    app.add_config_value("runs", {}, "env")
    # In place of MyST-NB's, which knows one page only.
    app.add_role_to_domain("glue", "text", Quote(), override=True)
    app.connect("source-read", _replace)


class Quote(SphinxRole):
    """A figure, and how it moved; one that is missing for no known reason warns."""

    def run(self) -> tuple[list[nodes.Node], list]:
        name, _, spec = self.text.partition(":")
        runs, text, at = self.config.runs, ABSENT, self.get_location()
        warn = getLogger(__name__).warning
        if name in runs["figures"]:
            try:
                text = format(runs["figures"][name], spec)
            except (ValueError, OverflowError) as error:
                warn("figure %s: %s", self.text, error, location=at)
        elif not (name in runs["absent"] or runs["failed"]):
            warn("no chapter has a figure %s", name, location=at)
        if name in runs["moved"]:
            text += f" (moved: {runs['moved'][name]})"
        return [nodes.Text(text)], []


def _replace(app: Any, page: str, source: list[str]) -> None:
    """Have Sphinx read a chapter as `render` wrote it, if it did."""
    if (written := Path(app.outdir).parent / f"pages/{page}.ipynb").is_file():
        source[0] = written.read_text("utf-8")
