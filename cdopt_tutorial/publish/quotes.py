"""Figures that pages quote from the runs, and notes where these can't be relied on.

A part of the extension `pages`. A page quotes a figure by the role ``glue:text``, with
its name and, after a colon, its format. "NN-minutes" is how long chapter NN took.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util.docutils import SphinxRole
from sphinx.util.logging import getLogger

ABSENT = "(not measured)"  # a figure that was not reached, or lacks its library
FAILED = f"""What ran is shown below; a figure that was not reached reads {ABSENT}, on
every page. Once it is mended, `cdopt-tutorial execute` with its file runs it alone.
What the error means is said under """
MOVED = """They moved farther than they may, so a sentence that quotes them may not be
true. What to do is said under """


def setup(app: Any) -> None:
    """Register the role in place of MyST-NB's, which knows one page only."""
    # What `render` read from the runs: figures, and how some of them moved, by name;
    # why chapters failed, by page; figures whose library is not installed.
    empty: dict[str, Any] = {"figures": {}, "moved": {}, "failed": {}, "absent": []}
    app.add_config_value("runs", empty, "env")
    app.add_role_to_domain("glue", "text", Quote(), override=True)
    app.connect("doctree-read", _add_notes)


class Quote(SphinxRole):
    """A figure; one that is missing for no known reason leaves a warning."""

    def run(self) -> tuple[list[nodes.Node], list]:
        runs, at = self.config.runs, self.get_location()
        warn = getLogger(__name__).warning
        name, _, spec = self.text.partition(":")
        self.env.temp_data.setdefault("quoted", {})[name] = None  # for `_add_notes`
        failed = {re.split("[/_]", page)[1] for page in runs["failed"]}
        text = ABSENT
        if name in runs["figures"]:
            try:
                text = format(runs["figures"][name], spec)
            except ValueError as error:
                warn("figure %s: %s", self.text, error, location=at)
        elif name not in runs["absent"] and name.partition("-")[0] not in failed:
            warn("no chapter has a figure %s", name, location=at)
        return [nodes.Text(text)], []


def _add_notes(app: Any, page: nodes.document) -> None:
    """Put below a page's title that it failed, and which of its figures moved."""
    runs, quoted = app.config.runs, app.env.temp_data.get("quoted", {})
    notes, moved = [], runs["moved"]
    if why := runs["failed"].get(app.env.docname):
        title = "This chapter did not run through"
        notes.append(_note("danger", title, why, FAILED, "/book/errors"))
    if rows := [f"{name}: {moved[name]}" for name in quoted if name in moved]:
        title = "Figures that moved"
        notes.append(_note("warning", title, "\n".join(rows), MOVED, "/book/moves"))
    if notes and (heading := page.next_node(nodes.title)):
        heading.parent[1:1] = notes


def _note(kind: str, title: str, what: str, text: str, page: str) -> nodes.Node:
    """An admonition: what is so, as it is, then a text that ends in a link."""
    link = pending_xref("", nodes.inline(), refdomain="std", reftype="doc")
    link.update_all_atts({"reftarget": page, "refexplicit": False, "refwarn": True})
    shown = nodes.literal_block(what, what, language="text")
    said = nodes.paragraph("", text, link, nodes.Text("."))
    return nodes.admonition("", nodes.title("", title), shown, said, classes=[kind])
