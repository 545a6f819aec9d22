"""Give each chapter's page its outputs, and a note if it failed or a figure has moved.

An extension of Sphinx: `render` names it, and says in `page_notes` what is to be noted.
"""

import json
import re
from pathlib import Path
from typing import Any

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
    """Have Sphinx, which calls this once, put the notes on each page as it is read."""
    app.add_config_value("page_notes", {}, "env")
    app.connect("source-read", _annotate)


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
