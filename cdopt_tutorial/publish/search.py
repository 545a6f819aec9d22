"""What the pages' search takes from a query, such as a message that was pasted.

An extension. Sphinx shows the pages that have every word, but miscounts where a word,
or its stem, has less than three letters, as "an" and "one" have; and no page has the
numbers of somebody's message.
"""

from typing import Any

from sphinx.search.en import SearchEnglish


class Words(SearchEnglish):
    """English, whose queries are their longer words if they have any."""

    js_splitter_code = r"""
var splitQuery = (query) => {
  const words = query.split(/[^\p{L}\p{N}_]+/u).filter((word) => word);
  const stem = (word) => new Stemmer().stemWord(word.toLowerCase());
  const long = words.filter((word) => !/^\d/.test(word) && stem(word).length > 2);
  return long.length ? long : words;
};
"""


def setup(app: Any) -> None:
    """Have Sphinx, which calls this once, use it."""
    app.add_search_language(Words)
