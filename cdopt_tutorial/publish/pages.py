"""An extension of Sphinx: chapters as `render` wrote them, figures, glossary, search.

Each term of the glossary is linked where a chapter first uses it. The link holds the
meaning, so that the style sheet can show it without a script, and offline. The search
accepts a pasted error message.
"""

import html
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.search.en import SearchEnglish

from cdopt_tutorial.publish import quotes

GLOSSARY = "book/glossary"
# Everyday words, linked only where a chapter emphasizes them, as it does new terms.
EVERYDAY = {"control", "cut", "engine", "environment", "figure", "future", "master"}
EVERYDAY |= {"original", "parent", "profile", "reference", "result", "role", "round"}
EVERYDAY |= {"semantics", "span", "token", "trace", "wire"}


def setup(app: Any) -> None:
    """Register all of this with Sphinx, which calls this once."""
    quotes.setup(app)
    app.add_config_value("written_pages", "", "env")
    app.add_search_language(Words)
    app.connect("source-read", _replace)
    app.connect("doctree-resolved", _link)


class Words(SearchEnglish):
    """English, with short words and numbers dropped from a query that has others.

    Sphinx shows pages with all words, but miscounts words whose stem has fewer than
    three letters, such as "an" and "one"; and no page has the numbers of one message.
    Questions begin with words that say nothing, and pages come before the reference.
    """

    stopwords = SearchEnglish.stopwords | {*"how what when where which who why".split()}
    stopwords |= {*"do does can could should my from".split()}
    js_splitter_code = r"""
var Scorer = {
  objNameMatch: 2, objPartialMatch: 1, objPrio: {0: 0, 1: 0, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
var splitQuery = (query) => {
  const words = query.split(/[^\p{L}\p{N}_]+/u).filter((word) => word);
  const stem = (word) => new Stemmer().stemWord(word.toLowerCase());
  const long = words.filter((word) => !/^\d/.test(word) && stem(word).length > 2);
  return long.length ? long : words;
};
"""


def _replace(app: Any, page: str, source: list[str]) -> None:
    """Have Sphinx read a chapter as `render` wrote it, if it did."""
    if (written := Path(app.config.written_pages, f"{page}.ipynb")).is_file():
        source[0] = written.read_text("utf-8")


def _link(app: Any, page: nodes.document, name: str) -> None:
    """Link the glossary's terms in a chapter, in place, each where it comes first."""
    if not name.startswith("notebooks/") or GLOSSARY not in app.env.found_docs:
        return
    to = app.builder.get_relative_uri(name, GLOSSARY)
    left = _meanings(app.env)
    # The first letter may be a capital.
    terms = [f"(?i:{re.escape(word[0])}){re.escape(word[1:])}" for word in left]
    longest_first = "|".join(sorted(terms, key=len, reverse=True))
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
    meant = f'data-meaning="{html.escape(meaning)}"'
    link = f'<a class="term" href="{to}#{where}" {meant}>{html.escape(word)}</a>'
    return nodes.raw("", link, format="html")


def _meanings(env: Any) -> dict[str, tuple[str, str]]:
    """Each term's place in the glossary, and its meaning."""
    meanings = {}
    for entry in env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
        term = next(entry.findall(nodes.term))
        lines = next(entry.findall(nodes.paragraph)).astext().splitlines()
        # The last line names the chapter.
        meanings[term.astext()] = term["ids"][0], " ".join(lines[:-1])
    return meanings
