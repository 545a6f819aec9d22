"""The pages: strict each time, nothing run, nothing done when nothing changed."""

import json
import re

import pytest
import yaml
from books import smallest_book, write_chapter

from cdopt_tutorial.publish import render as module
from cdopt_tutorial.publish.chapter import read_chapter
from cdopt_tutorial.publish.execute import execute, find_result, open_cache
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.render import RenderError, render


@pytest.fixture
def book(tmp_path) -> Project:
    return smallest_book(tmp_path / "a book")


def run(project: Project):
    return execute(project.chapters(), project=project)


def test_pages_hold_the_result_and_are_built_once(book):
    run(book)
    assert render(book) is True
    assert "42" in (book.html / "notebooks/01_a.html").read_text()
    front = (book.html / "book/index.html").read_text()
    assert "notebooks/01_a" in front and "cache" in front
    assert "Executing notebook" not in (book.build / "render.log").read_text()
    assert render(book) is False
    write_chapter(book, "print(6 * 7)", prose="# New prose")
    assert run(book)[0].cached
    assert render(book) is True
    page = (book.html / "notebooks/01_a.html").read_text()
    assert "New prose" in page and "42" in page


@pytest.fixture
def builds(book, monkeypatch):
    """Builds nothing but an empty front page; raises what the list begins with."""
    errors = []

    def build(project, config):
        project.html.mkdir()
        (project.html / "index.html").touch()
        if errors:  # a build with warnings leaves its pages there, too
            raise errors.pop()

    monkeypatch.setattr(module, "_run_builder", build)
    run(book)
    assert render(book) is True
    return errors


def test_a_result_made_anew_is_rendered_anew(book, builds):
    execute(book.chapters(), project=book, force=True)
    assert [render(book), render(book)] == [True, False]


def test_another_version_is_rendered_anew(book, builds, monkeypatch):
    monkeypatch.setattr(module, "VERSION", "9.9")
    assert [render(book), render(book)] == [True, False]


@pytest.mark.parametrize(
    "file",
    ["CONTRIBUTING.md", "tests/test_a.py", "book/deep/a.svg", "_toc.yml"]
    + ["_config.yml", "constraints.txt"],
)
def test_another_source_is_rendered_anew(book, builds, file):
    (book.root / file).parent.mkdir(exist_ok=True)
    with (book.root / file).open("a") as source:
        source.write("# New\n")
    run(book)
    assert [render(book), render(book)] == [True, False]


def test_a_page_that_is_gone_is_rendered_again(book, builds):
    (book.html / "index.html").unlink()
    assert [render(book), render(book)] == [True, False]


def test_a_build_that_failed_is_not_up_to_date(book, builds):
    index = book.root / "book/index.md"
    good = index.read_text()
    index.write_text("# Bad\n")
    builds.append(RenderError())
    with pytest.raises(RenderError):
        render(book)
    index.write_text(good)
    assert render(book) is True


def test_a_page_quotes_figures_minutes_and_the_versions_that_were_tried(book):
    show = "from cdopt_tutorial import show\nshow.glue('01-x', 0.25)"
    write_chapter(book, show)
    (done,) = run(book)
    config = yaml.safe_load((book.root / "_config.yml").read_text())
    config["parse"] = {"myst_enable_extensions": ["substitution"]}
    (book.root / "_config.yml").write_text(yaml.safe_dump(config))
    change = {"figure": "01-x", "was": "1", "now": "2", "allowed": "± 0", "holds": 0}
    tried = {"torch": "2.99", "python": "3.99", "cdopt": "0.5", "chapters": "1 of 1"}
    tried |= {"seconds": 90, "failures": ["KeyError: `x`"], "changes": [change]}
    found = {"date": "2026-11-22", "profile": "smoke", "environments": [tried]}
    found["machine"] = {"processor": "x86_64", "cores": 2}
    (book.root / "book/versions.json").write_text(json.dumps(found))
    quote = "\nx is {{ figures['01-x'] }}, {{ minutes['01_a'] }} minutes\n"
    quote += "\n{{ versions }}\n"
    with (book.root / "book/index.md").open("a") as file:
        file.write(quote)
    render(book)
    page = (book.html / "book/index.html").read_text()
    assert f"x is 0.25, {done.seconds / 60} minutes" in page
    rows = [" ".join(re.sub("<.*?>", " ", r).split()) for r in page.split("</tr>")]
    assert "3.99 2.99 0.5 – – 1 of 1 – 2" in rows
    assert rows[-2] == "01-x 1 ± 0 2" and rows[-3].endswith("stored allowed torch 2.99")
    assert "<strong>2</strong>" in page and ">KeyError:<" in page


def test_versions_that_can_not_be_read_are_named(book):
    run(book)
    for text in ("{", "[]", "{}"):
        (book.root / "book/versions.json").write_text(text)
        with pytest.raises(RenderError, match="^book/versions.json can't be read: "):
            render(book)


def test_builder_that_ends_badly_is_a_failure(book, monkeypatch):
    run(book)
    monkeypatch.setattr(module, "_BUILDER", "raise SystemExit('said last')")
    with pytest.raises(
        RenderError,
        match="^the pages do not build cleanly:\njupyter-book failed:\nsaid last",
    ):
        render(book)


def test_chapter_without_a_result_fails_each_time(book):
    write_chapter(book, "1 / 0")
    run(book)
    for _ in range(2):
        with pytest.raises(RenderError, match="01_a.ipynb has no valid result: run "):
            render(book)


def test_warning_fails_each_time_and_is_named(book):
    run(book)
    with (book.root / "book/index.md").open("a") as file:
        file.write("\n[nowhere](nowhere.md), {py:func}`nothing.of_the_sort`\n")
    for _ in range(2):
        with pytest.raises(RenderError) as caught:
            render(book)
        for missing in ("nowhere", "nothing.of_the_sort"):
            assert re.search(f"WARNING.*{missing}", str(caught.value))


def test_builder_that_runs_a_chapter_itself_is_a_failure(book, monkeypatch):
    run(book)
    chapter = read_chapter(*book.chapters())
    old = find_result(open_cache(book, "cpu"), chapter)
    monkeypatch.setattr(module, "find_result", lambda *args: old)
    write_chapter(book, "print(43)")
    with pytest.raises(RenderError, match="Executing notebook"):
        render(book)
