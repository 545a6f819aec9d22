"""An extension of Sphinx: chapters as `render` wrote them, figures, and the glossary.

A page quotes a figure of any chapter by the role ``glue:text``, with its name and,
after a colon, its format; "NN-minutes" is how long chapter NN took. A term of the
glossary is linked where a chapter first emphasizes it, as it does new terms.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util.docutils import SphinxRole
from sphinx.util.logging import getLogger

ABSENT = "(not measured)"  # a figure that was not reached, or lacks its library
FAILED = f"""This chapter did not run through. What ran is shown below; a figure that
was not reached reads {ABSENT}, on every page. Once it is mended, `cdopt-tutorial
execute` with its file runs it alone. What the error means is said under """


def setup(app: Any) -> None:
    """Register all of this with Sphinx, which calls this once."""
    # What `render` read from the runs: figures, and how some of them moved, by name;
    # why chapters failed, by page; figures whose library is not installed.
    app.add_config_value("runs", {}, "env")
    # In place of MyST-NB's, which knows one page only.
    app.add_role_to_domain("glue", "text", Quote(), override=True)
    app.connect("source-read", _replace)
    app.connect("doctree-read", _note_failure)
    app.connect("doctree-resolved", _link_terms)


class Quote(SphinxRole):
    """A figure, and how it moved; one that is missing for no known reason warns."""

    def run(self) -> tuple[list[nodes.Node], list]:
        runs, at = self.config.runs, self.get_location()
        warn = getLogger(__name__).warning
        name, _, spec = self.text.partition(":")
        chapter, text = f"notebooks/{name.partition('-')[0]}_", ABSENT
        failed = any(page.startswith(chapter) for page in runs["failed"])
        if name in runs["figures"]:
            try:
                text = format(runs["figures"][name], spec)
            except ValueError as error:
                warn("figure %s: %s", self.text, error, location=at)
        elif name not in runs["absent"] and not failed:
            warn("no chapter has a figure %s", name, location=at)
        if name not in runs["moved"]:
            return [nodes.Text(text)], []
        moved = nodes.Text(f": {runs['moved'][name]})")
        return [nodes.Text(f"{text} ("), _link("/book/moves", "moved"), moved], []


def _replace(app: Any, page: str, source: list[str]) -> None:
    """Have Sphinx read a chapter as `render` wrote it, if it did."""
    if (written := Path(app.outdir).parent / f"pages/{page}.ipynb").is_file():
        source[0] = written.read_text("utf-8")


def _note_failure(app: Any, page: nodes.document) -> None:
    """Put below the title of a chapter that failed where, and what to do."""
    why = app.config.runs["failed"].get(app.env.docname)
    if why and (heading := page.next_node(nodes.title)):
        shown = nodes.literal_block(why, why, language="text")
        link = _link("/book/errors", "When something goes wrong")
        said = nodes.paragraph("", FAILED, link, nodes.Text("."))
        heading.parent.insert(1, nodes.danger("", shown, said))


def _link(page: str, text: str) -> nodes.Node:
    link = pending_xref("", nodes.inline("", text), refdomain="std", reftype="doc")
    link.update_all_atts({"reftarget": page, "refexplicit": True, "refwarn": True})
    return link


def _link_terms(app: Any, page: nodes.document, name: str) -> None:
    """Link each term of the glossary where a chapter first emphasizes it, in place."""
    if not name.startswith("notebooks/"):
        return
    find, linked = app.env.domains["std"].resolve_xref, set()
    words = page.findall(nodes.emphasis)
    for word in [word for word in words if isinstance(word.parent, nodes.paragraph)]:
        for term in (word.astext(), word.astext().removesuffix("s")):
            link = find(app.env, name, app.builder, "term", term, word, word.deepcopy())
            if link and link["refuri"] not in linked:
                linked.add(link["refuri"])
                word.replace_self(link)
