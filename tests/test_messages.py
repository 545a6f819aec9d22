"""The page of other programs' messages: each is said, and no longer once mended."""

import re
import subprocess
import sys
from pathlib import Path

import message_roles as roles
import pytest
from clumsy import pattern

TERM = re.compile(r"^(`.+`)(?: \(by hand\)| \(not run\))?\n: ", re.MULTILINE)
CASES = [case.__name__ for case in roles.ALONE + roles.CALLER]
CASES += [f"{rank}/{case.__name__}" for case in roles.GROUP for rank in (0, 1)]
HALF = "1/call_alone", "1/peer_dies"  # here only the other rank complains

pytestmark = pytest.mark.xdist_group("messages")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What each case said, in a file."""
    folder = tmp_path_factory.mktemp("messages")
    (folder / "0").mkdir()
    (folder / "1").mkdir()
    command = [sys.executable, "-W", "ignore", roles.__file__]
    subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def entries(project) -> list[list[re.Pattern]]:
    """The messages of each entry that is said to be provoked here."""
    page = (project.root / "book/messages.md").read_text()
    assert len(TERM.findall(page)) == len(re.findall("^: ", page, re.MULTILINE))
    here = [each[1] for each in TERM.finditer(page) if each[0].endswith("`\n: ")]
    return [[*map(pattern, re.findall("`(.+?)`", term))] for term in here]


def test_what_is_said_is_on_the_page_and_nothing_once_it_is_mended(folder, entries):
    for case in CASES:
        assert (folder / f"{case}-True").read_text() == "", case
        if case not in HALF:
            said = (folder / f"{case}-False").read_text()
            assert any(each.search(said) for entry in entries for each in entry), said


# Of a peer that has died gloo says one thing or another.
def test_of_every_entry_something_is_said(folder, entries):
    said = "\n".join(file.read_text() for file in folder.glob("**/*-False"))
    for entry in entries:
        assert any(each.search(said) for each in entry), entry
