"""An extension of Sphinx: chapters as `render` wrote them, and figures.

A page quotes a figure of any chapter by the role ``glue:text``, with its name and,
after a colon, its format; "NN-minutes" is how long chapter NN took.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxRole
from sphinx.util.logging import getLogger

ABSENT = "(not measured)"  # a figure that was not reached, or lacks its library


def setup(app: Any) -> None:
    """Register all of this with Sphinx, which calls this once."""
    # What `render` read from the runs: figures, and how some of them moved, by name;
    # those whose library is not installed; whether a chapter failed.
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
            except ValueError as error:
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
