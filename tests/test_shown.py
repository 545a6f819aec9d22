"""Source code that the chapters show in their prose is the package's."""

import nbformat
import pytest
from shown import blocks, complaints

from cdopt_tutorial.publish.project import this_project

# As wide as a cell of code. A function fits a page, and a block is shorter, better.
COLUMNS = 78
LINES = 30

ROOT = this_project().root
SHOWN = [
    pytest.param(path, code, id=f"{chapter.stem}-{number}")
    for chapter in this_project().chapters()
    for number, (path, code) in enumerate(blocks(nbformat.read(chapter, as_version=4)))
]


@pytest.mark.parametrize("path, code", SHOWN)
def test_what_is_shown_is_the_package_s_short_and_narrow(path, code):
    assert complaints(code, (ROOT / path).read_text("utf-8")) == []
    assert len(code.splitlines()) <= LINES
    assert max(map(len, code.splitlines())) <= COLUMNS


def test_what_is_not_as_in_the_file_is_found():
    source = "class A(B):\n    def f(self):\n        return 1\n"
    for block, *said in (
        ("class A(B):\n    def f(self): return 1",),
        ("class A(B): ...",),
        ("class A(B):\n    def f(self): return 2", "A.f is not as in the file"),
        ("class A: ...", "A is not as in the file"),
        ("class C: ...", "C is not in the file"),
        ("class A(B):\n    x = 1", "A needs `...`", "A.x is not in the file"),
    ):
        found = complaints(block, source)
        assert len(found) == len(said), (block, found)
        assert all(map(str.startswith, found, said)), (block, found)
