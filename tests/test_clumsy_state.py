"""A damaged book, or no room for it, is named in one line."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from books import run, smallest_book, write_chapter
from clumsy import ends

from cdopt_tutorial.publish.project import Project

TABLE = "[01_a.figures]\nx = {seen = 1.0}\n"

NOTEBOOK = "...: it is no notebook, or it is damaged"
NOTEBOOKS = {
    "3": NOTEBOOK, "\x00\xff": NOTEBOOK, '{"cells": [': NOTEBOOK,
    '{"cells": {}, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}': NOTEBOOK,
    '{"cells": [], "metadata": {}, "nbformat": 9, "nbformat_minor": 5}': NOTEBOOK,
}  # fmt: skip

BAD = "notebooks/reference.toml can't be read: "
TABLES = {
    "x = 1": f"{BAD}...", "[01_a]\nfigures = 3": f"{BAD}...",
    "[01_a.figures]\nx = 1": f"{BAD}...",
    "[01_a.figures]\nx = {within = 1}": f"{BAD}there is no rule 'within'",
    "[01_a": f"{BAD}...",
    "[a.figures]\nx = 1\nx = 2": f"{BAD}...",
    "\xff": f"{BAD}...",
}  # fmt: skip

PLACES = {
    "the folder of results": "[Errno 17] File exists: '.../_build/results'",
    "the build": "[Errno 20] Not a directory: '.../_build/results'",
}
LOCKED = "[Errno 13] Permission denied: '...'"
NO_PLACE = "[Errno 2] No usable temporary directory found in [...]"
FULL = "[Errno 28] No space left on device: '...'"
COMMANDS = {
    "execute none.ipynb": "[Errno 2] No such file or directory: 'none.ipynb'",
    "execute -p y 1": "notebooks/01_a.ipynb: no parameter 'y'; there are: x",
    "execute -p x 1 --update-reference":
        "--update-reference is for whole runs on the cpu",
    "execute --short --anew": "--update-reference is for whole runs on the cpu",
}  # fmt: skip
NO_BOOK = (
    "no book around the installed package: ... has no _config.yml; install from a "
    "clone with `make book`"
)

pytestmark = pytest.mark.usefixtures("scratch", "no_kernel")


@pytest.fixture
def book(tmp_path, monkeypatch) -> Project:
    """The command's book: its only chapter has been run."""
    project = smallest_book(tmp_path / "book")
    (project.root / "notebooks" / "reference.toml").write_text(TABLE)
    path = write_chapter(project, "x = 1", "glue('x', 1.0)", parameters=True)
    (done,) = run(project, path)
    assert done.figures == {"x": 1.0}
    monkeypatch.setattr("cdopt_tutorial.publish.project.this_project", lambda: project)
    return project


class TestResults:
    @pytest.mark.parametrize("what", PLACES)
    def test_whose_folder_is_a_file(self, book, what, capsys):
        places = {"the folder of results": book.results, "the build": book.build}
        place = places[what]
        shutil.rmtree(place)
        place.write_text("a file of mine")
        ends("execute", PLACES[what], 2, capsys)
        assert place.read_text() == "a file of mine"

    @pytest.mark.parametrize("what", ["the book", "the results"])
    def test_of_someone_else(self, book, what, as_another, monkeypatch, capsys):
        if what == "the book":
            shutil.rmtree(book.build)
        # Other users may not enter pytest's own folder.
        with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
            os.chmod(open_to_all, 0o755)
            other = Project(Path(shutil.copytree(book.root, f"{open_to_all}/book")))
            at = "cdopt_tutorial.publish.project.this_project"
            monkeypatch.setattr(at, lambda: other)
            with as_another(other.root):
                ends("execute", LOCKED, 2, capsys)


def test_a_file_that_is_no_notebook(book, capsys):
    (chapter,) = book.chapters()
    for content in NOTEBOOKS:
        chapter.write_bytes(content.encode("latin1"))
        ends("execute", NOTEBOOKS[content], 2, capsys)
    ends("build", NOTEBOOKS[content], 2, capsys)


def test_a_file_that_is_no_table(book, capsys):
    for content in TABLES:
        (book.root / "notebooks/reference.toml").write_bytes(content.encode("latin1"))
        ends("execute", TABLES[content], 2, capsys)


def test_what_a_book_does_not_have(book, capsys):
    for args in COMMANDS:
        ends(args, COMMANDS[args], 2, capsys)


def test_a_package_without_a_book(monkeypatch, tmp_path, capsys):
    place = tmp_path / "lib" / "cdopt_tutorial" / "publish" / "project.py"
    monkeypatch.setattr("cdopt_tutorial.publish.project.__file__", str(place))
    ends("execute", NO_BOOK, 2, capsys)


class TestPlace:
    def test_no_temporary_directory(self, monkeypatch, capsys):
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/none"])
        ends("hybrid --smoke", NO_PLACE, 2, capsys)

    def test_a_temporary_directory_that_is_full(self, monkeypatch, scratch, capsys):
        def full(path, _):
            raise OSError(28, "No space left on device", str(path))

        monkeypatch.setattr(Path, "write_bytes", full)  # of what a worker is to read
        ends("hybrid --smoke", FULL, 1, capsys)
