"""The book as one file of Markdown: what only Sphinx understands has become plain."""

import re

import pytest
from books import smallest_book, write_chapter, write_contents

from cdopt_tutorial.publish import markdown
from cdopt_tutorial.publish.chapter import read_chapter

PAGE = """# A page

(place)=
## A place
See [](../notebooks/01_a.ipynb), [there](#place), [api](api/data.md), {cite:p}`x2023`.
It took {{ "%.1f" % minutes["01_a"] }} min, not {{ "%.1f" % minutes["02_b"] }}.

```{exercise}
:label: ex
Ask.
```

````{admonition} Mind
:class: tip
```{raw} html
:file: gone.svg
```
Keep.
````
"""


@pytest.fixture
def whole(tmp_path):
    """The text of a book of a front page, a chapter and a page."""
    book = smallest_book(tmp_path)
    write_contents(book, {}, "book/page", "book/api/data")
    write_chapter(
        book, "1", prose="# Chapter\n\n{glue:text}`01-x:.2f`, {glue:text}`no`"
    )
    (book.root / "book/page.md").write_text(PAGE)
    (path,) = book.chapters()
    quotes = {"figures": {"01-x": 2 / 3}, "minutes": {"01_a": 1.26}}
    chapters = {"notebooks/01_a": read_chapter(path)}
    markdown.write(tmp_path, book.root, chapters, quotes)
    return (tmp_path / "book.md").read_text(), (tmp_path / "llms.txt").read_text()


def test_numbers_and_links_are_filled_in(whole):
    text, index = whole
    assert "0.67, (not measured)" in text
    assert "It took 1.3 min, not (not measured)." in text
    assert "See [Chapter](#notebooks-01_a), [there](#place), api, [x2023]." in text
    targets = re.findall(r"\]\(#([^)]+)\)", text)
    assert {*targets} <= {*re.findall(r'<a id="([^"]+)"></a>', text)}
    assert "- [Chapter](notebooks/01_a.html)" in index and "data" not in index


def test_directives_become_plain_and_code_stays(whole):
    text, _ = whole
    assert "**Exercise.**" in text and "Ask." in text and ":label:" not in text
    assert "**Mind**" in text and "Keep." in text and "gone.svg" not in text
    assert "```python\n1\n```" in text and "```{" not in text


@pytest.mark.xdist_group("book")
def test_of_this_book_leads_nowhere_astray(site):
    text, index = (site / "book.md").read_text(), (site / "llms.txt").read_text()
    targets = re.findall(r"\]\(#([^)]+)\)", text)
    assert targets and {*targets} <= {*re.findall(r'<a id="([^"]+)"></a>', text)}
    # A link to a file would lead nowhere from where the reader has put this one.
    assert not re.findall(r"\]\((?!#|\w+:)", re.sub("```.*?```", "", text, flags=re.S))
    pages = re.findall(r"\]\((?!\w+:)([^)]+)\)", index)
    assert len(pages) > 20 and all((site / page).exists() for page in pages)
