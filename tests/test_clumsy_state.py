"""A damaged book, or no room for it, is named in one line."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from books import run, smallest_book, write_chapter
from clumsy import ends

from cdopt_tutorial.publish.project import Project

NOTEBOOK = "...: it is no notebook, or it is damaged"
BAD = "notebooks/reference.toml can't be read: "
# What is in the files of a book, and the line that it leads to.
DAMAGED = {
    "notebooks/01_a.ipynb": {
        "3": NOTEBOOK, "\x00\xff": NOTEBOOK, '{"cells": [': NOTEBOOK,
        '{"cells": {}, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}': NOTEBOOK,
        '{"cells": [], "metadata": {}, "nbformat": 9, "nbformat_minor": 5}': NOTEBOOK,
    },
    "notebooks/reference.toml": {
        "x = 1": f"{BAD}...", "[01_a]\nfigures = 3": f"{BAD}...",
        "[01_a.figures]\nx = 1": f"{BAD}...", "[01_a": f"{BAD}...",
        "[01_a.figures]\nx = {within = 1}": f"{BAD}there is no rule 'within'",
        "[a.figures]\nx = 1\nx = 2": f"{BAD}...", "\xff": f"{BAD}...",
    },
}  # fmt: skip
PLACES = {
    "_build/results": "[Errno 17] File exists: '.../_build/results'",
    "_build": "[Errno 20] Not a directory: '.../_build/results'",
}
COMMANDS = {
    "execute none.ipynb": "[Errno 2] No such file or directory: 'none.ipynb'",
    "execute -p y 1": "notebooks/01_a.ipynb: no parameter 'y'; there are: x",
    "execute -p x 1 --update-reference":
        "--update-reference is for whole runs on the cpu",
    "execute --short --anew": "--update-reference is for whole runs on the cpu",
}  # fmt: skip
LOCKED = "[Errno 13] Permission denied: '...'"
NO_PLACE = "[Errno 2] No usable temporary directory found in [...]"
FULL = "[Errno 28] No space left on device: '...'"
NO_BOOK = (
    "no book around the installed package: ... has no _config.yml; install from a "
    "clone with `make book`"
)
THIS = "cdopt_tutorial.publish.project.this_project"

pytestmark = pytest.mark.usefixtures("scratch", "no_kernel")


@pytest.fixture
def book(tmp_path, monkeypatch) -> Project:
    """The command's book: its only chapter has been run."""
    project = smallest_book(tmp_path / "book")
    table = project.root / "notebooks" / "reference.toml"
    table.write_text("[01_a.figures]\nx = {seen = 1.0}\n")
    path = write_chapter(project, "x = 1", "glue('x', 1.0)", parameters=True)
    (done,) = run(project, path)
    assert done.figures == {"x": 1.0}
    monkeypatch.setattr(THIS, lambda: project)
    return project


@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_file(file, book, capsys):
    for content, line in DAMAGED[file].items():
        (book.root / file).write_bytes(content.encode("latin1"))
        ends("execute", line, 2, capsys)
    if file.endswith("ipynb"):
        ends("build", line, 2, capsys)


@pytest.mark.parametrize("place", PLACES)
def test_results_whose_folder_is_a_file(place, book, capsys):
    shutil.rmtree(book.root / place)
    (book.root / place).write_text("a file of mine")
    ends("execute", PLACES[place], 2, capsys)
    assert (book.root / place).read_text() == "a file of mine"


def test_a_book_of_someone_else(book, as_another, monkeypatch, capsys):
    shutil.rmtree(book.build)
    # Other users may not enter pytest's own folder.
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        os.chmod(open_to_all, 0o755)
        other = Project(Path(shutil.copytree(book.root, f"{open_to_all}/book")))
        monkeypatch.setattr(THIS, lambda: other)
        with as_another(other.root):
            ends("execute", LOCKED, 2, capsys)


@pytest.mark.parametrize("args", COMMANDS)
def test_what_a_book_does_not_have(args, book, capsys):
    ends(args, COMMANDS[args], 2, capsys)


def test_a_package_without_a_book(monkeypatch, tmp_path, capsys):
    place = tmp_path / "lib" / "cdopt_tutorial" / "publish" / "project.py"
    monkeypatch.setattr("cdopt_tutorial.publish.project.__file__", str(place))
    ends("execute", NO_BOOK, 2, capsys)


def test_no_temporary_directory(monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/none"])
    ends("hybrid --smoke", NO_PLACE, 2, capsys)


def test_a_temporary_directory_that_is_full(monkeypatch, scratch, capsys):
    def full(path, _):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)  # of what a worker is to read
    ends("hybrid --smoke", FULL, 1, capsys)
