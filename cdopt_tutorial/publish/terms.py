"""Link each word of the glossary where a chapter uses it first, with what it means.

An extension of Sphinx. The meaning is in the link itself, so that the pages' style can
show it on hover and on focus, without a script and from a file.
"""

import html
import re
from typing import Any

from docutils import nodes

GLOSSARY = "book/glossary"
# Everyday words, too: only where a chapter emphasizes them, as it does with new ones.
EVERYDAY = {"control", "cut", "engine", "environment", "figure", "future", "master"}
EVERYDAY |= {"original", "parent", "profile", "reference", "result", "role", "round"}
EVERYDAY |= {"semantics", "span", "token", "trace", "wire"}


def setup(app: Any) -> None:
    """Have Sphinx, which calls this once, link the words before it writes a page."""
    app.connect("doctree-resolved", _link)


def _link(app: Any, page: nodes.document, name: str) -> None:
    """Link the words of a chapter, in place, each where it comes first."""
    if not name.startswith("notebooks/") or GLOSSARY not in app.env.found_docs:
        return
    to = app.builder.get_relative_uri(name, GLOSSARY)
    left = _meanings(app.env)
    # The first letter may be a capital.
    each = [f"(?i:{re.escape(word[0])}){re.escape(word[1:])}" for word in left]
    longest_first = "|".join(sorted(each, key=len, reverse=True))
    words = re.compile(rf"(?<![\w-])({longest_first})s?(?![\w-])")
    for text in list(page.findall(nodes.Text)):
        is_new = isinstance(text.parent, nodes.emphasis)  # as chapters show it
        within = text.parent.parent if is_new else text.parent
        if isinstance(within, nodes.paragraph):  # no title, no link, no code
            parts, done = [], 0
            for match in words.finditer(text):
                word = match[1] if match[1] in left else match[1].lower()
                if word in left and (is_new or word not in EVERYDAY):
                    link = _anchor(match[0], to, *left.pop(word))
                    parts += [nodes.Text(text[done : match.start()]), link]
                    done = match.end()
            text.parent.replace(text, [*parts, nodes.Text(text[done:])])


def _anchor(word: str, to: str, where: str, meaning: str) -> nodes.Node:
    """A link to the glossary."""
    meant = f'data-meaning="{html.escape(meaning)}"'
    link = f'<a class="term" href="{to}#{where}" {meant}>{html.escape(word)}</a>'
    return nodes.raw("", link, format="html")


def _meanings(env: Any) -> dict[str, tuple[str, str]]:
    """Of each word, its place in the glossary and its meaning."""
    found = {}
    for entry in env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
        term = next(entry.findall(nodes.term))
        lines = next(entry.findall(nodes.paragraph)).astext().splitlines()
        # The last line leads to the chapter.
        found[term.astext()] = term["ids"][0], " ".join(lines[:-1])
    return found
