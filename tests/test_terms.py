"""The glossary's terms in the chapters."""

import re
from types import SimpleNamespace

import pytest
from docutils.core import publish_doctree

from cdopt_tutorial.publish import pages as terms

GLOSSARY = """
rank
  A worker's number.
  Chapter 5.

cut
  Where a model is divided.
  Chapter 2.

process group
  Ranks & what they share.
  Chapter 5.

map A
  Leaves a circle where it is.
  Chapter 3.
"""


def linked(text: str, name: str = "notebooks/05_ddp_rpc") -> str:
    """A chapter's text, with links in brackets."""
    page, glossary = publish_doctree(text), publish_doctree(GLOSSARY)
    for term in glossary.findall(terms.nodes.term):
        term["ids"] = [f"term-{term.astext()}"]
    env = SimpleNamespace(get_doctree=lambda _: glossary, found_docs={terms.GLOSSARY})
    to = SimpleNamespace(get_relative_uri=lambda *_: "../book/glossary.html")
    terms._link(SimpleNamespace(env=env, builder=to), page, name)
    return re.sub(r"<a .*?>(.*?)</a>", r"[\1]", page.astext().replace("\n\n", " "))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A rank, and a rank.", "A [rank], and a rank."),
        ("Ranks are frank.", "[Ranks] are frank."),
        ("A process group of ranks", "A [process group] of [ranks]"),
        ("We cut it. A *cut* is where.", "We cut it. A [cut] is where."),
        ("``rank`` and `a rank <http://to>`__: rank", "rank and a rank: [rank]"),
        ("This we map as before, by a map A.", "This we map as before, by a [map A]."),
    ],
)
def test_the_first_of_each_is_linked(text, expected):
    assert linked(text) == expected


def test_a_link_says_what_the_word_means_and_leads_to_the_glossary():
    place, meaning = "term-process-group", "Ranks & what they share."
    where = terms._anchor("process groups", "glossary.html", place, meaning).astext()
    link = '<a class="term" href="glossary.html#term-process-group" data-meaning='
    assert where == f'{link}"Ranks &amp; what they share.">process groups</a>'


def test_other_pages_are_left_as_they_are():
    assert linked("A rank.", "book/setup") == "A rank."
