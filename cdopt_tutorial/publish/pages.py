"""What Sphinx does to a page: outputs, notes, and links to the glossary.

An extension. A chapter's page gets its outputs; a page gets a note if its chapter
failed, or if a figure has moved that it quotes: `render` says so in `page_notes`. Each
word of the glossary is linked where a chapter uses it first, with its meaning in the
link itself, so that the style can show it without a script and from a file.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes

GLOSSARY = "book/glossary"
# Everyday words, too: only where a chapter emphasizes them, as it does with new ones.
EVERYDAY = {"control", "cut", "engine", "environment", "figure", "future", "master"}
EVERYDAY |= {"original", "parent", "profile", "reference", "result", "role", "round"}
EVERYDAY |= {"semantics", "span", "token", "trace", "wire"}
ABSENT = "(not measured)"  # a figure not reached, or without its library
# What fills in a figure; behind a backtick it is shown as it is written.
_QUOTE = re.compile(r"(?<!`)\{glue:text\}`([^`]+?)(?::[^:`]*)?`|\{\{.+?\}\}")
_NAME = re.compile(r"""\[["'](.+?)["']\]""")

_FAILED = """
``````{{admonition}} This chapter did not run through
:class: danger
`````text
{why}
`````
What ran is shown below; a figure that was not reached reads {absent}, on every page.
"[](/book/errors.md)" says what the error means; to run this chapter alone, mended:
`````sh
cdopt-tutorial execute {page}.ipynb
`````
``````
"""
_MOVED = """
``````{{admonition}} Figures that moved
:class: warning
They moved farther than they may, so a sentence that quotes them may not hold.
"[](/book/moves.md)" says what to do.

{rows}
``````
"""


def setup(app: Any) -> None:
    """Have Sphinx, which calls this once, change each page: as it is read, and last."""
    app.add_config_value("page_notes", {}, "env")
    app.connect("builder-inited", _complete)
    app.connect("source-read", _annotate)
    app.connect("doctree-resolved", _link)


def _complete(app: Any) -> None:
    """Let the one page that is printed have what each page has.

    Where an extension names the builder of that page, Sphinx forgets all others, which
    only name HTML.
    """
    writers = app.registry.translation_handlers
    for node, write in writers.get("html", {}).items():
        writers.setdefault("singlehtml", {}).setdefault(node, write)


def _annotate(app: Any, page: str, source: list[str]) -> None:
    """Change the source of a page, in place, where it has outputs, or needs a note."""
    failed, moved = app.config.page_notes["failed"], app.config.page_notes["moved"]
    absent = set(app.config.page_notes["absent"])
    ran = Path(app.config.page_notes["pages"], Path(app.env.doc2path(page)).name)
    if ran.exists():
        source[0] = ran.read_text("utf-8")
    quotes, quoted = app.config.myst_substitutions, set()
    known = quotes["figures"].keys() | quotes["minutes"].keys()
    numbers = {re.split("[/_]", chapter)[1] for chapter in failed}

    def fill(match: re.Match) -> str:
        names = {match[1]} if match[1] else {*_NAME.findall(match[0])}
        quoted.update(names)
        lost = {name for name in names if re.split("[-_]", name)[0] in numbers}
        return ABSENT if (lost | names & absent) - known else match[0]

    text, note = _QUOTE.sub(fill, source[0]), ""
    if page in failed:
        note += _FAILED.format(why=failed[page], absent=ABSENT, page=page)
    if rows := [f"- `{name}`: {moved[name]}" for name in moved if name in quoted]:
        note += _MOVED.format(rows="\n".join(rows))
    if note and ran.exists():
        notebook = json.loads(text)
        first = notebook["cells"][0]  # it has the title
        first["source"] = _below_title("".join(first["source"]), note)
        text = json.dumps(notebook)
    elif note:
        text = _below_title(text, note)
    source[0] = text


def _below_title(text: str, note: str) -> str:
    """Return a page's text with a note as its first paragraph."""
    return re.sub("(?m)^# .*$", lambda title: f"{title[0]}\n{note}", text, count=1)


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
