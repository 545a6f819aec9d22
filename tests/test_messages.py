"""The page of other programs' messages: each appears."""

import re
import subprocess
import sys

import message_roles
import pytest
from clumsy import pattern
from hosts import PATIENCE

TERM = re.compile(r"^(`.+`)(?: \(by hand\)| \(not run\))?\n: ", re.MULTILINE)


@pytest.mark.xdist_group("messages")
def test_the_page_has_each_message_and_no_other(project, tmp_path):
    page = (project.root / "book/messages.md").read_text()
    assert len(TERM.findall(page)) == len(re.findall("^: ", page, re.MULTILINE))
    here = [term[1] for term in TERM.finditer(page) if term[0].endswith("`\n: ")]
    entries = [[*map(pattern, re.findall("`(.+?)`", term))] for term in here]
    program = [sys.executable, "-Wignore", message_roles.__file__]
    how = {"capture_output": True, "check": True, "timeout": PATIENCE}
    subprocess.run(program, cwd=tmp_path, **how)
    texts = [file.read_text().split("\0")[:-1] for file in tmp_path.glob("*.said")]
    said = sum(texts, [])
    for text in said:
        assert any(each.search(text) for entry in entries for each in entry), text
    for entry in entries:  # gloo has several for a peer that has died
        assert any(each.search(text) for each in entry for text in said), entry
