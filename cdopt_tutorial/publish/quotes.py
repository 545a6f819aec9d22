"""Figures that pages quote from the runs, and notes where these can't be relied on.

A page quotes a figure by the role ``glue:text``, with its name and, after a colon, its
format. "NN-minutes" is how long chapter NN took.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from cdopt_tutorial.publish.chapter import Figures

ABSENT = "(not measured)"  # a figure that was not reached, or lacks its library
# After a backtick the role is shown as it is written.
_QUOTE = re.compile(r"(?<!`)\{glue:text\}`([^`]+?)(?::([^:`]*))?`")

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


@dataclass(frozen=True)
class Quotes:
    """What pages may quote, and what they must note; pages are named without suffix."""

    figures: Figures  #: by name
    moved: Mapping[str, str]  #: how figures moved, by name
    failed: Mapping[str, str]  #: why chapters failed, by page
    absent: Set[str]  #: figures whose library is not installed

    def fill_in(self, page: str, texts: Sequence[str]) -> list[str]:
        """Return the parts of a page with their figures, and notes below the title.

        A figure that is missing for no known reason is left for Sphinx to warn of.
        """
        quoted, numbers = set(), {re.split("[/_]", name)[1] for name in self.failed}

        def fill(match: re.Match) -> str:
            name, spec = match.groups("")
            quoted.add(name)
            if name in self.figures:
                return format(self.figures[name], spec)
            lost = name in self.absent or name.partition("-")[0] in numbers
            return ABSENT if lost else match[0]

        filled, note = [_QUOTE.sub(fill, text) for text in texts], ""
        if page in self.failed:
            note += _FAILED.format(why=self.failed[page], absent=ABSENT, page=page)
        if rows := [f"- `{n}`: {how}" for n, how in self.moved.items() if n in quoted]:
            note += _MOVED.format(rows="\n".join(rows))
        if note:
            title = re.compile("^# .*$", re.MULTILINE)
            filled[0] = title.sub(lambda t: f"{t[0]}\n{note}", filled[0], count=1)
        return filled
