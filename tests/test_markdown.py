"""The book as one Markdown file: without anything that only Sphinx understands."""

import re

import pytest
from books import smallest_book, write_chapter

from cdopt_tutorial.publish import markdown
from cdopt_tutorial.publish.chapter import read_chapter

PAGE = """# A page

(place)=
## A place
See [](../notebooks/01_a.ipynb), [there](#place), [api](api/data.md), {cite:p}`x2023`.

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
    """Both files of a book with a front page, a chapter and a page."""
    book = smallest_book(tmp_path)
    chapter = read_chapter(write_chapter(book, "1", prose="# Chapter"))
    pages = {"book/index": "# Front", "notebooks/01_a": chapter, "book/page": PAGE}
    markdown.write(tmp_path, pages | {"book/api/data": "# Data"})
    return (tmp_path / "book.md").read_text(), (tmp_path / "llms.txt").read_text()


def test_links_lead_to_places_in_it(whole):
    text, index = whole
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
def test_of_this_book_has_no_broken_link(site):
    text, index = (site / "book.md").read_text(), (site / "llms.txt").read_text()
    targets = re.findall(r"\]\(#([^)]+)\)", text)
    assert targets and {*targets} <= {*re.findall(r'<a id="([^"]+)"></a>', text)}
    # A link to a file would be broken wherever a reader keeps this one.
    assert not re.findall(r"\]\((?!#|\w+:)", re.sub("```.*?```", "", text, flags=re.S))
    pages = re.findall(r"\]\((?!\w+:)([^)]+)\)", index)
    assert len(pages) > 20 and all((site / page).exists() for page in pages)
