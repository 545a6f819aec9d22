"""Rendering: strict each time, and left out when nothing has changed.

A chapter that fails takes no other page with it.
"""

import re

import pytest
import yaml
from books import run, smallest_book, write_chapter, write_contents

from cdopt_tutorial.cli import main
from cdopt_tutorial.publish import paper
from cdopt_tutorial.publish import render as module
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.render import RenderError, render


@pytest.fixture
def book(tmp_path, no_kernel) -> Project:
    """A book whose chapters are run without a kernel."""
    return smallest_book(tmp_path / "a book")


@pytest.fixture
def builds(book, monkeypatch):
    """Renders an empty front page instead; an error put into this list is raised."""
    errors = []

    def build(project, config):
        project.html.mkdir()
        (project.html / "index.html").touch()
        if errors:  # a build with warnings leaves its pages there, too
            raise errors.pop()

    monkeypatch.setattr(module, "run_builder", build)
    run(book)
    assert render(book) is True
    return errors


def test_whatever_decides_the_pages_renders_them_anew_once(book, builds, monkeypatch):
    def is_new(what: str) -> None:
        assert [render(book), render(book)] == [True, False], what

    write_chapter(book, "# bare_a.py\nprint(6 * 7)")
    run(book)
    is_new("a result")
    for name in (
        "CONTRIBUTING.md", "tests/test_a.py", "book/deep/a.svg", "_toc.yml",
        "_config.yml",
    ):  # fmt: skip
        file = book.root / name
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as source:
            source.write("# New\n")
        run(book)
        is_new(name)
    (book.html / "index.html").unlink()
    is_new("a page that is gone")
    monkeypatch.setattr(module, "VERSION", "9.9")
    is_new("a version")
    monkeypatch.setenv("CDOPT_TUTORIAL_REPOSITORY", "https://github.com/an/other")
    is_new("a site")


def test_a_build_that_failed_is_not_up_to_date(book, builds):
    index = book.root / "book/index.md"
    good = index.read_text()
    index.write_text("# Bad\n")
    builds.append(RenderError())
    with pytest.raises(RenderError):
        render(book)
    index.write_text(good)
    assert render(book) is True


def test_builder_that_ends_badly_is_a_failure(book, monkeypatch):
    run(book)
    monkeypatch.setattr(module, "_BUILDER", "raise SystemExit('said last')")
    what = "^the pages do not build cleanly:\njupyter-book failed:\nsaid last"
    with pytest.raises(RenderError, match=what):
        render(book)


GLUE = "glue({!r}, {!r})"
QUOTE = "Here x is {glue:text}`01-x:.2f`, written ``{glue:text}`01-x:.2f` ``."
TABLE = """
[01_a.figures]
01-x = {seen = 0.2, at_most = 0.2}
01-z = {needs = "no_such", seen = 1}
[02_b.figures]
02-y = {seen = 6, at_most = 8}
"""
FRONT = """
x is {glue:text}`01-x:.1f` in {glue:text}`01-minutes` minutes,
y is {glue:text}`02-y`, z is {glue:text}`01-z`.
"""


@pytest.fixture
def larger(book, monkeypatch) -> Project:
    """A book of two chapters; the front page quotes figures of both."""
    monkeypatch.setattr("cdopt_tutorial.publish.project.this_project", lambda: book)
    config = yaml.safe_load((book.root / "_config.yml").read_text())
    write_contents(book, config, "notebooks/02_b", "book/errors", "book/moves")
    code = "print(6 * 7)  # fmt: skip"
    write_chapter(book, code, GLUE.format("02-y", 7), name="02_b")
    write_chapter(book, GLUE.format("01-x", 0.25), prose=f"# A chapter\n\n{QUOTE}")
    (book.root / "notebooks/reference.toml").write_text(TABLE)
    for name, title in {"errors": "Errors", "moves": "Moves"}.items():
        (book.root / f"book/{name}.md").write_text(f"# {title}\n\n`01-x`, `02-y`\n")
    with (book.root / "book/index.md").open("a") as file:
        file.write(FRONT)
    return book


def words(book: Project, page: str) -> str:
    """The text of a page's article, in one line."""
    text = (book.html / page).read_text()
    article = re.search("<article.*</article>", text, re.DOTALL)[0]
    return " ".join(re.sub("<.*?>", "", article, flags=re.DOTALL).split())


def test_a_chapter_that_fails_takes_no_page_with_it(larger, capfd):
    broken = "y = 0\n1 / y", GLUE.format("01-x", 0.25), "print('never', 'reached')"
    write_chapter(larger, "print('so' + ' far')", *broken, prose=f"# Broken\n\n{QUOTE}")
    assert main(["execute"]) == 1
    capfd.readouterr()
    assert main(["build"]) == 1
    said = capfd.readouterr()
    # Only the chapter without a result is run again.
    assert re.findall("running notebooks/(.*).ipynb", said.out) == ["01_a"]
    assert "\nrendering the pages\n" in said.out
    assert "ZeroDivisionError: division by zero" in said.err
    assert said.err.endswith("\na chapter failed: its page says what to do\n")
    assert said.out.endswith("\nthe book: _build/html/index.html\n")
    page = words(larger, "notebooks/01_a.html")
    note, _, below = page.partition("Here x is ")
    assert note.startswith("Broken# This chapter did not run through ")
    assert "notebooks/01_a.ipynb failed in code cell 2 of 4, which begins" in note
    assert "y = 0 ZeroDivisionError: division by zero" in note
    assert "cdopt-tutorial execute notebooks/01_a.ipynb" in note
    assert "kept as far as it ran: _build/failed/01_a.ipynb" in note
    assert "“Errors” says what the error means" in note
    assert below.startswith("(not measured), written {glue:text}`01-x:.2f` .")
    assert "so far" in below and "Traceback" in below
    assert "never reached" not in below
    assert "42" in words(larger, "notebooks/02_b.html")
    assert "did not run" not in words(larger, "notebooks/02_b.html")
    front = words(larger, "book/index.html")
    assert "x is (not measured) in (not measured) minutes, y is 7, " in front
    assert "moved" not in front


def test_pages_hold_the_result_the_prose_of_today_and_what_moved(larger, capfd):
    (done, _) = run(larger)
    write_chapter(larger, GLUE.format("01-x", 0.25), prose=f"# New prose\n\n{QUOTE}")
    capfd.readouterr()
    assert main(["build"]) == 0
    assert "running" not in capfd.readouterr().out  # other prose is the same code
    note = "Figures that moved They moved farther than they may, so a sentence that "
    note += "quotes them may not hold. “Moves” says what to do. "
    note += "01-x: was 0.2, is 0.25 (allowed: at most 0.2) "
    page = words(larger, "notebooks/01_a.html")
    quote = "Here x is 0.25, written {glue:text}`01-x:.2f` ."
    assert page.startswith(f"New prose# {note}{quote}")
    for other in ("notebooks/02_b", "book/errors"):  # which quote none that moved
        assert "moved" not in words(larger, f"{other}.html")
    assert "print(6 * 7) 42" in words(larger, "notebooks/02_b.html")
    front = words(larger, "book/index.html")
    assert front.startswith(f"Front# {note}") and "02-y" not in front
    quote = f"x is 0.2 in {done.seconds / 60} minutes, y is 7, z is (not measured)."
    assert quote in front
    assert main(["build"]) == 0
    assert "nothing changed: no page was rendered" in capfd.readouterr().out


def test_short_results_are_rendered_on_request_and_have_not_moved(larger):
    code = "x = 0.25", GLUE.format("01-x", 0.0).replace("0.0", "x")
    write_chapter(
        larger, *code, prose=f"# Short\n\n{QUOTE}", parameters=True, short={"x": 7.5}
    )
    run(larger, short=True)
    render(larger, short=True)
    page = words(larger, "notebooks/01_a.html")
    assert page.startswith("Short# Here x is 7.50, ") and "from outside" not in page
    render(larger)
    assert "There is no result." in words(larger, "notebooks/01_a.html")


def test_beside_a_chapter_that_has_never_run_all_else_is_strict(larger):
    write_chapter(larger, "!echo {6 * 7}")  # Python's lexer would warn of it
    lines = "{glue:text}`02-none`, {glue:text}`01-x`", "[](nowhere.md)"
    with (larger.root / "book/index.md").open("a") as file:
        file.write("\n\n".join(["", *lines, "{py:func}`nothing.of_the_sort`\n"]))
    run(larger, *larger.chapters()[1:])
    with pytest.raises(RenderError) as caught:
        render(larger)
    said = [line for line in str(caught.value).splitlines() if "WARNING" in line]
    for missing in ("02-none", "nowhere", "nothing.of_the_sort"):
        assert sum(missing in line for line in said) == 1
    assert len(said) == 3
    page = words(larger, "notebooks/01_a.html")
    assert "There is no result." in page and "!echo {6 * 7}" in page


def test_pages_are_printed_by_chromium_with_links(book, chromium):
    run(book)
    render(book)
    printed = paper.print_pages(book).read_bytes()
    assert printed.startswith(b"%PDF") and b"/Link" in printed


def test_without_chromium_nothing_is_printed(book, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    said = "no Chromium to print with: apt-get install chromium"
    with pytest.raises(RenderError, match=f"^{said}$"):
        paper.print_pages(book)
