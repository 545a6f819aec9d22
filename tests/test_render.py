"""Rendering: strict, but a chapter that fails takes no other page with it."""

import re

import pytest
import yaml
from books import run, smallest_book, write_chapter, write_contents
from clumsy import ends

from cdopt_tutorial.cli import main
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.render import render

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
def book(tmp_path, no_kernel, monkeypatch) -> Project:
    """The command's book of two chapters; the front page quotes figures of both."""
    book = smallest_book(tmp_path / "a book")
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


# A file of the book, and what is appended to it.
UNREADABLE = {
    "_toc.yml": [
        "\t- x",
        "a: [",
        "key: 1",
        "- file: notebooks/01_a",
        "- file: notebooks/03_c",
    ],
    "_config.yml": ["a: [", "titel: A book", "html: {favicn: x.svg}", "sphinx:"],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named_before_a_chapter_runs(book, name, capsys):
    text = (book.root / name).read_text()
    for more in UNREADABLE[name]:
        (book.root / name).write_text(f"{text}\n{more}\n")
        ends("build", f"{name} can't be read: ...", 2, capsys)


def test_a_chapter_that_fails_takes_no_page_with_it(book, capfd):
    broken = "y = 0\n1 / y", GLUE.format("01-x", 0.25), "print('never', 'reached')"
    prose = f"```python\n# not a title\n```\n\nBroken\n======\n\n{QUOTE}"
    write_chapter(book, "print('so' + ' far')", *broken, prose=prose)
    for command in "execute", "build":
        assert main([command]) == 1
        said = capfd.readouterr()
        assert "ZeroDivisionError: division by zero" in said.err
    # Only the chapter without a result is run again.
    assert re.findall("running notebooks/(.*).ipynb", said.out) == ["01_a"]
    assert said.err.endswith("\na chapter failed: its page says what to do\n")
    assert said.out.endswith("\nthe book: _build/html/index.html\n")
    page = words(book, "notebooks/01_a.html")
    note, _, below = page.partition("Here x is ")
    assert note.startswith("Danger notebooks/01_a.ipynb failed in code cell 2 of 4")
    assert "ZeroDivisionError: division by zero This chapter did not run thr" in note
    assert "What the error means is said under When something goes wrong." in note
    assert below.startswith("(not measured), written {glue:text}`01-x:.2f` .")
    assert "so far" in below and "Traceback" in below
    assert "never reached" not in below
    other = words(book, "notebooks/02_b.html")
    assert "42" in other and "did not run" not in other
    front = words(book, "book/index.html")
    assert "x is (not measured) in (not measured) minutes, y is 7, " in front
    assert "moved" not in front


def test_pages_hold_the_result_the_prose_of_today_and_what_moved(book, capfd):
    (done, _) = run(book)
    write_chapter(book, GLUE.format("01-x", 0.25), prose=f"# New prose\n\n{QUOTE}")
    capfd.readouterr()
    assert main(["build"]) == 0
    assert "running" not in capfd.readouterr().out  # other prose is the same code
    moved = "(moved: is 0.25, allowed: at most 0.2)"
    page = words(book, "notebooks/01_a.html")
    assert page.startswith(f"New prose# Here x is 0.25 {moved}, written ")
    assert "written {glue:text}`01-x:.2f` ." in page
    assert "print(6 * 7) 42" in words(book, "notebooks/02_b.html")
    quote = f"x is 0.2 {moved} in {done.metadata['seconds'] / 60} minutes, y is 7, "
    assert f"{quote}z is (not measured)." in words(book, "book/index.html")


def test_short_results_are_rendered_on_request_and_have_not_moved(book):
    code = "x = 0.25", GLUE.format("01-x", 0.0).replace("0.0", "x")
    path = write_chapter(book, *code, prose=f"# Short\n\n{QUOTE}", short={"x": 7.5})
    run(book, path, short=True)
    assert render(book)
    page = words(book, "notebooks/01_a.html")
    assert page.startswith("Short# Here x is 7.50, ") and "short profile" not in page
    book.short = False
    assert render(book)
    assert "There is no result." in words(book, "notebooks/01_a.html")


# What a page may not have, and a part of the line that says so.
WRONG = {
    "{glue:text}`02-none`": "figure 02-none",
    "{glue:text}`01-w`": "figure 01-w",  # a chapter's names begin with its number
    "{glue:text}`02-y:.1f`": "figure 02-y:.1f",
    "{glue:text}`02-big:.1f`": "figure 02-big:.1f",
    "[](nowhere.md)": "nowhere",
    "{py:func}`nothing.of_the_sort`": "nothing.of_the_sort",
}


def test_a_page_that_is_not_clean_is_a_failure(book, capfd):
    code = GLUE.format("02-y", "a text"), GLUE.format("01-w", 1)
    write_chapter(book, *code, GLUE.format("02-big", 10**400), name="02_b")
    with (book.root / "book/index.md").open("a") as file:
        file.write("\n".join(["", *WRONG, ""]))
    assert main(["build"]) == 1
    *_, last = said = capfd.readouterr().err.splitlines()
    assert (
        last == "cdopt-tutorial: the pages do not build cleanly: a warning is an error"
    )
    said = [line for line in said if "WARNING" in line]
    for words in WRONG.values():
        assert sum(words in line for line in said) == 1
    assert len(said) == len(WRONG)
    assert (book.html / "notebooks/02_b.html").is_file()


def test_a_chapter_that_has_never_run_has_its_page(book):
    write_chapter(book, "!echo {6 * 7}")  # Python's lexer would warn of it
    assert render(book)
    page = words(book, "notebooks/01_a.html")
    assert "There is no result." in page and "!echo {6 * 7}" in page
