"""What a clumsy call of the command must come to: one line, and its code.

``...`` stands in a line for what differs from one machine to another; on the page
`book/errors.md`, from one call to another. A module `test_clumsy_*.py` has in `LINES`
all lines that its tests see; `test_errors_page.py` holds them against the page.
"""

import re

import pytest

from cdopt_tutorial import cli

DIVERGED = "the training diverged; lower --lr, or --penalty if it is above 1"


def pattern(line: str) -> re.Pattern:
    """What matches a line with ``...`` in it."""
    return re.compile(".+".join(map(re.escape, line.split("..."))))


def read_cases(text: str) -> dict[str, str]:
    """What is asked for, in lines at the margin, and the line that is said to each."""
    cases = {}
    for block in re.findall(r"^(?:\S.*\n)+(?: .*\n)+", text, re.MULTILINE):
        asked = re.findall(r"^\S.*", block, re.MULTILINE)
        said = re.findall(r"^ +(.*)", block, re.MULTILINE)
        cases |= dict.fromkeys(asked, " ".join(said))
    return cases


def ends(args: str, line: str, code: int, capsys: pytest.CaptureFixture) -> None:
    """Run the command: it must say this line and nothing else, and give this code."""
    assert cli.main(args.split()) == code
    said = capsys.readouterr()
    assert said.out == ""
    (found,) = said.err.splitlines()
    assert pattern(f"cdopt-tutorial: {line}").fullmatch(found), found
