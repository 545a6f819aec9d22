"""The page of other programs' messages: each appears."""

import re
import subprocess
import sys
from pathlib import Path

import message_roles as roles
import pytest
from clumsy import pattern
from hosts import PATIENCE

TERM = re.compile(r"^(`.+`)(?: \(by hand\)| \(not run\))?\n: ", re.MULTILINE)
CASES = [case.__name__ for case in roles.ALONE + roles.CALLER]
CASES += [f"{rank}/{case.__name__}" for case in roles.GROUP for rank in (0, 1)]
HALF = "1/call_alone", "1/peer_dies"  # where only the other rank complains

pytestmark = pytest.mark.xdist_group("messages")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The message of each case, in a file."""
    folder = tmp_path_factory.mktemp("messages")
    (folder / "0").mkdir()
    (folder / "1").mkdir()
    command = [sys.executable, "-W", "ignore", roles.__file__]
    subprocess.run(
        command, cwd=folder, capture_output=True, check=True, timeout=PATIENCE
    )
    return folder


@pytest.fixture(scope="module")
def entries(project) -> list[list[re.Pattern]]:
    """The messages of each entry that the page says is provoked here."""
    page = (project.root / "book/messages.md").read_text()
    assert len(TERM.findall(page)) == len(re.findall("^: ", page, re.MULTILINE))
    here = [each[1] for each in TERM.finditer(page) if each[0].endswith("`\n: ")]
    return [[*map(pattern, re.findall("`(.+?)`", term))] for term in here]


def test_the_page_has_each_message_and_no_other(folder, entries):
    said = {case: (folder / case).read_text() for case in CASES if case not in HALF}
    for case, text in said.items():
        assert any(each.search(text) for entry in entries for each in entry), case
    for entry in entries:  # gloo has several for a peer that has died
        found = any(each.search(text) for each in entry for text in said.values())
        assert found, entry
