"""A clumsy call of the command must end as the page `book/errors.md` says.

On the page, and in the lines that tests expect, ``...`` stands for what differs.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from cdopt_tutorial import cli

PAGE = Path(__file__).parents[1] / "book/errors.md"
DIVERGED = "the training diverged; lower --lr, or --penalty-param if it is above 1"


def pattern(line: str) -> re.Pattern:
    """A pattern for a line with ``...`` in it."""
    return re.compile(".+".join(map(re.escape, line.split("..."))))


@cache
def rows() -> list[str]:
    """The lines on the page."""
    row = re.compile(r"^\| (`+) ?(.+?) ?\1 \|", re.MULTILINE)
    return [line for _, line in row.findall(PAGE.read_text())]


def ends(args: str, line: str, code: int, capsys: pytest.CaptureFixture) -> None:
    """Run the command, which must print this line only, and return this code."""
    assert cli.main(args.split()) == code
    said = capsys.readouterr()
    assert said.out == ""
    (found,) = said.err.splitlines()
    assert pattern(f"cdopt-tutorial: {line}").fullmatch(found), found
    found = found.removeprefix("cdopt-tutorial: ")
    assert any(pattern(row).fullmatch(found) for row in rows()), found
