"""Figures and their reference: which count as moved, and what is written."""

import json
from importlib.metadata import version
from math import inf, nan
from pathlib import Path

import pytest
from books import write_chapter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from cdopt_tutorial import cli, show
from cdopt_tutorial.publish.chapter import claimed
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Change, Reference, origin, processor

TABLE = """\
# A comment that stays.
[01_a]
runs = ["one", "other"]

[01_a.figures]
near = {seen = [9.5, 10.0]}
far = {seen = 8.0}
share = {seen = [-2.0, -1.9]}  # so does this
gap = {at_most = 1e-10, seen = 0.0}
speed = {machine = true, seen = 3.0}
rounds = {chaotic = true, seen = 3}
count = {exact = true, seen = 7}
part = {exact = true, seen = 0.333333}
"""

FIGURES = {"near": 10.0, "share": -2.0, "gap": 0.0, "speed": 3.0, "count": 7}
FIGURES |= {"part": 1 / 3, "rounds": 9, "far": 8.0}


@pytest.fixture
def book(tmp_path) -> Project:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "cdopt_tutorial").mkdir()
    (tmp_path / "constraints.txt").touch()
    table(book := Project(tmp_path)).write_text(TABLE)
    return book


def table(book: Project) -> Path:
    """The file of a book's reference."""
    return book.root / "notebooks" / "reference.toml"


def moved(book, complete=True, **figures) -> list[str]:
    drift = Reference(book).drift("01_a", figures, complete=complete)
    return [f"{name}: {how}" for name, how in drift.items()]


def test_what_is_near_enough_has_not_moved(book):
    near = {"near": 10.4, "share": -2.09, "gap": 9e-11, "speed": 900.0}
    near = FIGURES | near
    assert moved(book, **FIGURES) == moved(book, **near) == []
    near |= {"near": 10.5, "share": -1.81, "gap": 1e-10, "speed": -inf}
    assert moved(book, **near) == []
    near |= {"near": 9.0, "gap": -1.0}
    assert moved(book, **near) == []


def test_where_all_machines_agreed_three_percent_is_near_enough(book):
    for far, is_near in {8.23: True, 7.77: True, 8.25: False, 7.75: False}.items():
        assert (moved(book, **FIGURES | {"far": far}) == []) == is_near


def test_what_lies_outside_of_what_was_seen_is_a_change_that_may_hold(book):
    figures = FIGURES | {"near": 10.2, "gap": 1e-11, "speed": 5.0}
    found = Reference(book).changes("01_a", figures)
    assert found == {
        "near": Change("9.5 to 10", "10.2", "9 to 10.5", holds=True),
        "gap": Change("0", "1e-11", "at most 1e-10", holds=True),
    }


def test_what_moved_is_listed_with_both_values(book):
    for name, value, how in (
        ("near", 10.6, "was 9.5 to 10, is 10.6 (allowed: 9 to 10.5)"),
        ("near", nan, "was 9.5 to 10, is nan (allowed: 9 to 10.5)"),
        ("share", -1.7, "was -2 to -1.9, is -1.7 (allowed: -2.1 to -1.8)"),
        ("share", 2.0, "was -2 to -1.9, is 2 (allowed: -2.1 to -1.8)"),
        ("gap", 1e-9, "was 0, is 1e-09 (allowed: at most 1e-10)"),
        ("gap", nan, "was 0, is nan (allowed: at most 1e-10)"),
        ("count", 8, "was 7, is 8 (allowed: 7)"),
        ("count", "seven", "was 7, is seven (allowed: 7)"),
        ("part", 0.33334, "was 0.333333, is 0.33334 (allowed: 0.333333)"),
    ):
        assert moved(book, **FIGURES | {name: value}) == [f"{name}: {how}"]
    table(book).write_text("[01_a.figures]\nx = {seen = inf}\n")  # nothing is near
    assert len(moved(book, x=5.0)) == len(moved(book, x=-inf)) == 1


def test_new_and_lost_figures_are_listed(book):
    figures = FIGURES | {"new": 1.5}
    del figures["near"]
    assert moved(book, **figures) == [
        "new: 1.5, and the reference has none",
        "near: was 9.5 to 10, is no longer there",
    ]
    # A chapter that failed half-way has fewer figures, which have not moved.
    assert moved(book, complete=False, near=10.0) == []


def test_what_is_measured_with_a_module_may_be_missing_without_it(book):
    for module, lost in ("json", ["x: was 1, is no longer there"]), ("no_such", []):
        row = f'{{needs = "{module}", at_most = 1, seen = 1}}'
        table(book).write_text(f"[01_a.figures]\nx = {row}\n")
        assert moved(book) == lost
        assert moved(book, x=2) == ["x: was 1, is 2 (allowed: at most 1)"]
    reference = Reference(book)
    assert reference.absent() == ["x"]
    reference.forget("01_a")
    for value in ("text", 2):
        reference.update("01_a", {"y": value}, "here")
    text = table(book).read_text()  # its rule is kept
    assert "no_such" in text and "at_most = 1" in text and "y = {seen = 2}" in text


def test_update_adds_a_run_to_what_was_seen(book):
    figures = FIGURES | {"near": 12.3456789, "share": -1.95, "speed": 99.0, "new": 2}
    figures |= {"count": 8, "text": "gloo"}
    del figures["gap"]
    for run in ("third", "third", "fourth"):
        Reference(book).update("01_a", figures, run)
    assert moved(book, **figures) == moved(book, **figures | {"near": 9.5}) == []
    text = table(book).read_text()
    for line in (
        "# A comment that stays.",
        "near = {seen = [9.5, 12.3457]}",
        "share = {seen = [-2.0, -1.9]}  # so does this",
        "speed = {machine = true, seen = [3.0, 99.0]}",
        "count = {exact = true, seen = 8}",
        'text = {seen = "gloo"}',
        'runs = ["one", "other", "third", "fourth"]',
    ):
        assert line in text
    assert "gap" not in text
    assert moved(book, **figures | {"new": 3})


def test_what_was_seen_can_be_forgotten(book):
    reference = Reference(book)
    reference.forget("01_a")
    reference.update("01_a", FIGURES | {"near": 4.0, "gap": 1e-12}, "new")
    assert moved(book, **FIGURES | {"near": 4.0}) == []
    near = moved(book, **FIGURES | {"near": 9.5})
    assert near == ["near: was 4, is 9.5 (allowed: 3.88 to 4.12)"]
    text = table(book).read_text()
    assert '"new"' in text and "one" not in text


def test_an_origin_may_be_that_of_another_machine():
    other = {"cpu": "avx2", "cores": 3, "python": "3.9.9", "torch": "2.0"}
    for threads, text in (0, ""), (2, "2 threads, "):
        machine = f"{processor()}, avx2, {text}3 cores; Python 3.9.9, torch 2.0"
        assert origin(threads=threads, **other).endswith(f": {machine}")


def test_update_begins_a_table(book):
    table(book).unlink()
    Reference(book).update("01_a", {"x": 1.0}, "here")
    assert moved(book, x=1.0) == []
    text = table(book).read_text()
    assert '\nruns = [\n    "here",\n]\n' in text  # a line for each, to be compared


@pytest.fixture
def here(book, no_kernel, monkeypatch) -> Project:
    """The command's book, whose chapters are run without a kernel."""
    monkeypatch.setattr("cdopt_tutorial.publish.project.this_project", lambda: book)
    return book


def write(book, figures: dict, *more: str):
    glue = [f"glue({name!r}, {value!r})" for name, value in figures.items()]
    code = ("epochs = 3", "\n".join(glue), *more)
    return write_chapter(book, *code, parameters=True)


def test_command_prints_drift_updates_and_begins_anew(here, capsys):
    write(here, FIGURES)
    assert cli.main(["execute"]) == 0
    assert "no figure has moved" in capsys.readouterr().out
    write(here, FIGURES | {"count": 9, "gap": 1e-3, "near": 11.0})
    # A reused result is compared, too; a bound stays as it is, and goes on failing.
    for flags in ([], [], ["--update-reference"]):
        assert cli.main(["execute", *flags]) == 3
        said = capsys.readouterr().err
        assert "count: was 7, is 9 (allowed: 7)" in said and "at most 1e-10" in said
    assert "near = {seen = [9.5, 11.0]" in table(here).read_text()
    assert cli.main(["execute"]) == 3
    said = capsys.readouterr().err
    assert "count" not in said and "at most 1e-10" in said
    write(here, FIGURES | {"near": 4.0})
    assert cli.main(["execute", "--update-reference", "--anew"]) == 0
    text = table(here).read_text()
    assert "seen = 4.0" in text and "one" not in text
    assert f"torch {version('torch')}" in text


def test_command_sets_parameters(here, capsys, tmp_path):
    write(here, {"near": 10.0}, "glue('epochs', epochs)")
    file = tmp_path / "out.json"
    for again in ("ran for", "reused"):
        args = ["-p", "epochs", "5", "--json", str(file)]
        assert cli.main(["execute", *args]) == 0
        said = capsys.readouterr().out
        assert "not compared" in said and again in said
        (found,) = json.loads(file.read_text())["chapters"].values()
        assert found["figures"] == {"near": 10.0, "epochs": 5}


def test_a_notebook_of_the_readers_own_is_not_compared(here, capsys, tmp_path_factory):
    chapter = write(here, FIGURES | {"near": 90.0})
    own = chapter.rename(tmp_path_factory.mktemp("own") / chapter.name)
    assert cli.main(["execute", str(own), "--update-reference"]) == 0
    assert "moved" not in capsys.readouterr().err
    assert table(here).read_text() == TABLE


def test_figures_of_a_chapter_that_failed_are_compared(here, capsys):
    write(here, FIGURES | {"near": 90.0}, "assert False")
    assert cli.main(["execute"]) == 1
    said = capsys.readouterr().err
    assert "near: was 9.5 to 10, is 90" in said and "AssertionError" in said


def test_claimed_reads_what_show_glues(monkeypatch):
    shown = []
    monkeypatch.setattr(show, "display", lambda *a, **kw: shown.append((*a, kw)))
    values = {"01-x": 0.5, "01-text": "gloo", "01-far": inf, "01-odd": object}
    for name, value in values.items():
        show.glue(name, value)
    outputs = [
        new_output("display_data", data=data, metadata=more["metadata"])
        for data, more in shown
    ]
    cell = new_code_cell("", outputs=outputs)
    found = claimed(new_notebook(cells=[cell]))
    assert found == values | {"01-odd": repr(object)}
