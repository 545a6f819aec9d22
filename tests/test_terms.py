"""The glossary's terms in the chapters."""

import re
from types import SimpleNamespace

import pytest
from docutils.core import publish_doctree

from cdopt_tutorial.publish import pages

GLOSSARY = """
rank
  A worker's number.
  Chapter 5.

process group
  Ranks & what they share.
  Chapter 5.

semantics
  Whose step it is.
  Chapter 5.
"""
LINK = '[process groups](../book/glossary.html#term-process-group "Ranks &amp; what'
# A chapter's text, and how it begins with links as in Markdown.
LINKED = {
    "A rank, a *rank*, a *rank*.": 'A rank, a [rank](../book/glossary.html#term-rank "',
    "*Process groups*": LINK.replace("[p", "[P"),
    "*process groups*": LINK,
    "*semantics*": "[semantics](",
    "*frank* ``rank``": "frank rank",
}


@pytest.mark.parametrize("text", LINKED)
def test_the_first_that_is_emphasized_is_linked_to_its_meaning(text):
    page, glossary = publish_doctree(text), publish_doctree(GLOSSARY)
    for term in glossary.findall(pages.nodes.term):
        term["ids"] = [f"term-{term.astext().replace(' ', '-')}"]
    env = SimpleNamespace(get_doctree=lambda _: glossary, found_docs={pages.GLOSSARY})
    to = SimpleNamespace(get_relative_uri=lambda *_: "../book/glossary.html")
    app = SimpleNamespace(env=env, builder=to)
    pages._link_terms(app, page, "book/setup")
    assert "<a" not in page.astext()
    pages._link_terms(app, page, "notebooks/05_ddp_rpc")
    link = r'<a class="term" href="(.*?)" data-meaning="(.*?)">(.*?)</a>'
    shown = re.sub(link, r'[\3](\1 "\2")', page.astext())
    assert shown.startswith(LINKED[text]) and shown.count("](") <= 1
