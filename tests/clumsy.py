"""A clumsy call of the command must end in one line, with the right exit code.

In a line ``...`` stands for what differs between machines, and on the page
`book/errors.md` between calls. Each module `test_clumsy_*.py` lists in `LINES` what its
tests see; `test_errors_page.py` compares that with the page.
"""

import re

import pytest

from cdopt_tutorial import cli

DIVERGED = "the training diverged; lower --lr, or --penalty if it is above 1"


def pattern(line: str) -> re.Pattern:
    """A pattern for a line with ``...`` in it."""
    return re.compile(".+".join(map(re.escape, line.split("..."))))


def read_cases(text: str) -> dict[str, str]:
    """Lines of arguments, which are not indented, and the line that each leads to."""
    cases = {}
    for block in re.findall(r"^(?:\S.*\n)+(?: .*\n)+", text, re.MULTILINE):
        calls = re.findall(r"^\S.*", block, re.MULTILINE)
        said = re.findall(r"^ +(.*)", block, re.MULTILINE)
        cases |= dict.fromkeys(calls, " ".join(said))
    return cases


def ends(args: str, line: str, code: int, capsys: pytest.CaptureFixture) -> None:
    """Run the command, which must print this line only, and return this code."""
    assert cli.main(args.split()) == code
    said = capsys.readouterr()
    assert said.out == ""
    (found,) = said.err.splitlines()
    assert pattern(f"cdopt-tutorial: {line}").fullmatch(found), found
