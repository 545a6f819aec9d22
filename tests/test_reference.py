"""Figures and their reference: which count as moved, and what is written."""

import json
import tomllib
from importlib.metadata import version
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
import recording
from books import glued, write_chapter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from cdopt_tutorial import cli, show
from cdopt_tutorial.publish.chapter import claimed
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference

TABLE = """\
# A comment that stays.
[01_a]
runs = ["one", "other"]

[01_a.figures]
near = {seen = [9.5, 10.0]}
far = {needs = "math", seen = 8.0}
share = {seen = [-2.0, -1.9]}  # so does this
gap = {at_most = 1e-10, seen = 0.0}
speed = {machine = true, seen = 3.0}
rounds = {chaotic = true, seen = 3}
count = {exact = true, seen = 7}
part = {exact = true, seen = 0.333333}
absent = {needs = "no_such", seen = 1}
"""
FIGURES = {"near": 10.0, "share": -2.0, "gap": 0.0, "speed": 3.0, "count": 7}
FIGURES |= {"part": 1 / 3, "rounds": 9, "far": 8.0}
# What a figure may be, and what not, with what is said then.
ALLOWED = {
    "near": [10.4, 10.5, 9.0],
    "far": [8.23, 7.77],
    "share": [-2.09, -1.81],
    "gap": [9e-11, 1e-10, -1.0],
    "speed": [900.0, -inf, "a text"],
}
MOVED = {
    "near": ([10.6, 8.9, nan, inf], "9 to 10.5"),
    "far": ([8.25, 7.75], "7.76 to 8.24"),
    "share": ([-1.7, 2.5], "-2.1 to -1.8"),
    "gap": ([1e-9, nan], "at most 1e-10"),
    "count": ([8, "seven"], "7"),
    "part": ([0.33334], "0.333333"),
    "absent": ([2], "0.97 to 1.03"),
}


@pytest.fixture
def book(tmp_path, no_kernel, monkeypatch) -> Project:
    """The command's book, whose chapters are run without a kernel."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "cdopt_tutorial").mkdir()
    (tmp_path / "constraints.txt").touch()
    table(book := Project(tmp_path)).write_text(TABLE)
    monkeypatch.setattr("cdopt_tutorial.publish.project.this_project", lambda: book)
    return book


def table(book: Project) -> Path:
    """The file of a book's reference."""
    return book.root / "notebooks" / "reference.toml"


def moved(book, metadata=None, **figures) -> dict[str, str]:
    """How figures moved that a run with these metadata has glued."""
    outputs = [glued(name, value) for name, value in figures.items()]
    cells = [new_code_cell("", outputs=outputs)]
    run = new_notebook(cells=cells, metadata=metadata or {})
    return Reference(book).drift("01_a", run)


def test_a_figure_may_leave_its_range_by_its_width_or_three_percent(book):
    assert moved(book, **FIGURES) == {}
    for name, values in ALLOWED.items():
        for value in values:
            assert moved(book, **FIGURES | {name: value}) == {}, (name, value)
    for name, (values, allowed) in MOVED.items():
        for value in values:
            (said,) = moved(book, **FIGURES | {name: value}).items()
            assert said == (name, f"is {value}, allowed: {allowed}")


def test_new_and_lost_figures_are_listed(book):
    figures = FIGURES | {"new": 1.5}
    del figures["near"]
    new, lost = "is 1.5, the reference has none", "is no longer there"
    assert moved(book, **figures) == {"new": new, "near": lost}
    # A chapter that failed half-way has fewer figures, which have not moved; and what
    # is measured with a library may be missing without it.
    assert moved(book, {"failed": "in a cell"}, near=10.0) == {}
    assert Reference(book).absent == ["absent"]


def write(book, figures: dict, *more: str):
    """Write a chapter that glues figures."""
    glue = [f"glue({name!r}, {value!r})" for name, value in figures.items()]
    return write_chapter(book, "\n".join(glue), *more)


def test_command_compares_new_and_reused_results_and_recording_takes_them(
    book, capsys, tmp_path, monkeypatch
):
    write(book, FIGURES)
    assert cli.main(["execute"]) == 0
    assert capsys.readouterr().err == ""
    figures = FIGURES | {"count": 9, "gap": 1e-3, "near": 11.0}
    write(book, figures)
    file = tmp_path / "out.json"
    for _ in ("new", "reused"):
        assert cli.main(["execute", "--json", str(file)]) == 3
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 3 and "allowed: at most 1e-10" in said
        (chapter,) = json.loads(file.read_text())["chapters"].values()
        assert len(chapter["moved"]) == 3 and chapter["figures"]["count"] == 9
    monkeypatch.setattr("recording.this_project", lambda: book)
    for more, near in ([], [9.5, 11.0]), (["--anew"], 11.0):
        monkeypatch.setattr("sys.argv", ["recording", *more])
        recording.main()
        assert moved(book, **figures) == {"gap": "is 0.001, allowed: at most 1e-10"}
        text = table(book).read_text()
        part = tomllib.loads(text)["01_a"]
        assert part["figures"]["near"] == {"seen": near}
        assert part["figures"]["count"] == {"exact": True, "seen": 9}
        assert f"torch {version('torch')}" in part["runs"][-1]
        assert "# A comment that stays." in text and "}  # so does this" in text
    write(book, FIGURES, "assert False")  # what has no result is not recorded
    with pytest.raises(SystemExit):
        recording.main()


def test_a_short_chapter_is_not_compared_but_one_that_failed(book, written, capsys):
    write_chapter(book, "near = 9.5", "glue('near', near)", short={"near": 90.0})
    for again in ("ran for", "reused"):
        (found,) = written("execute", "--short")["chapters"].values()
        assert again in capsys.readouterr().out
        assert found["figures"] == {"near": 90.0} and found["moved"] is None
    write(book, FIGURES | {"near": 90.0}, "assert False")
    assert written("execute", code=1)
    said = capsys.readouterr().err
    assert "near: is 90," in said and "AssertionError" in said


def test_claimed_reads_what_show_glues(monkeypatch):
    outputs = []

    def display(data, *, metadata, **_):
        outputs.append(new_output("display_data", data, metadata=metadata))

    monkeypatch.setattr(show, "display", display)
    values = {"01-x": 0.5, "01-text": "gloo", "01-far": inf, "01-n": np.int64(7)}
    for name, value in values.items():
        show.glue(name, value)
    cell = new_code_cell("", outputs=outputs)
    assert claimed(new_notebook(cells=[cell])) == values
    for odd in object, True:
        with pytest.raises(ValueError, match="^01-odd is .* must be a number or a te"):
            show.glue("01-odd", odd)
