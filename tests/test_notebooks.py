"""The chapters' notebooks follow the rules of CONTRIBUTING.md."""

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from types import ModuleType

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

from cdopt_tutorial.publish import chapter as chapters
from cdopt_tutorial.publish.chapter import read_chapter, tagged
from cdopt_tutorial.publish.execute import find_result
from cdopt_tutorial.publish.project import this_project

# Not counting the first code cell, the exercises, and what follows them.
CELLS = range(20, 43)
INSTALL_LINES = 10
LINES = 18
COLUMNS = 78

# Tags of cells that show an error on purpose: printed, or raised.
ANNOUNCED = {"prints-error", "raises-exception"}

# The last line of a traceback, an exception's repr, and a worker's failure.
ERROR = re.compile(
    r"Traceback \(most recent call last\)"
    r"|\b([A-Z]\w*)?(Error|Exception|Interrupt|Exit|StopIteration)\b *[:(]"
    r"|^\w+ (raised [A-Z]|exited with code|was killed by)"
    r"|\(stopped: \w+\)",
    re.MULTILINE,
)

CHAPTERS = this_project().chapters()
every_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


@cache
def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return chapters.code_cells(read(path))


def errors(cell) -> list[str]:
    """The lines of a code cell's outputs that show an error."""
    lines = [line for out in cell.outputs for line in shown(out).splitlines()]
    return [line for line in lines if ERROR.search(line)]


def shown(output) -> str:
    """What a reader sees of an output, as text."""
    match output.output_type:
        case "stream":
            return output.text
        case "error":
            return f"{output.ename}: {output.evalue}\n" + "\n".join(output.traceback)
    texts = [text for kind, text in output.data.items() if kind.startswith("text/")]
    # Source code that is shown may name errors.
    text = re.sub(r"^(`{3,}).*?^\1", "", "\n".join(texts), flags=re.M | re.S)
    return re.sub(r"<[^>]*>", "\n", text)


def unannounced(notebook) -> list[str]:
    """Errors in cells without the tag for it; tagged cells without an error."""
    found = []
    for cell in chapters.code_cells(notebook):
        announced = any(tagged(cell, tag) for tag in ANNOUNCED)
        if announced and not errors(cell):
            found.append(f"shows no error: {cell.source.splitlines()[0]}")
        found += [] if announced else errors(cell)
    return found


@every_chapter
def test_shows_no_error_that_its_cell_does_not_announce(path, project):
    ran = find_result(project, read_chapter(path), "cpu", short=True)
    asked = f"run `cdopt-tutorial execute {project.relative(path)}`"
    assert ran is not None and "failed" not in ran.metadata, asked
    assert unannounced(ran) == []


def test_chapters_import_only_what_the_install_cell_brings():
    # On Colab it installs cdopt and geoopt, and leaves alone what runs the kernel.
    absent = ("jupyter_cache", "nbclient", "sphinx", "tomlkit", "yaml")
    lines = [f"import sys; sys.modules |= dict.fromkeys({absent})"]
    for cell in [cell for path in CHAPTERS for cell in code_cells(path)]:
        tree = ast.parse(TransformerManager().transform_cell(cell.source))
        imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        lines += [line for line in map(ast.unparse, imports) if "cdopt" in line]
    assert len(lines) > len(CHAPTERS)
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@every_chapter
def test_has_the_form_of_every_chapter(path):
    chapter, cells = read_chapter(path), read(path).cells
    assert read(path).metadata.kernelspec.name == "python3"
    short = chapters.shortened(chapter)
    assert short.metadata.get("injected"), "it needs a short profile"
    (exercises,) = (i for i, cell in enumerate(cells) if "## Exercises" in cell.source)
    assert exercises - 1 in CELLS
    code = "\n".join(cell.source for cell in code_cells(path))
    assert {*re.findall(r"""["'](\d\d)-""", code)} == {path.stem[:2]}, (
        "names of figures"
    )


@every_chapter
def test_code_cells_are_empty_short_and_narrow(path):
    for cell in code_cells(path):
        assert (cell.outputs, cell.execution_count) == ([], None)
        lines = cell.source.splitlines()
        if not tagged(cell, "bare"):  # a whole program may be longer
            assert 1 <= len(lines) <= LINES, cell.source
            assert max(map(len, lines)) <= COLUMNS, cell.source
        # A program that fails must fail its chapter, and a path may have spaces.
        assert "{sys.executable}" not in cell.source.replace('"{sys.executable}"', "")
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if line.startswith("!") and "bare_" in line:
                assert following == "assert _exit_code == 0"


@every_chapter
def test_what_is_shown_is_the_last_in_its_cell(path):
    # Jupyter displays only the last expression, and silently drops others.
    for cell in code_cells(path):
        # Magics become calls.
        python = TransformerManager().transform_cell(cell.source)
        *others, _ = ast.parse(python).body
        lost = [ast.unparse(each) for each in others if shows(each)]
        assert not lost, cell.source


def shows(statement):
    """Whether a statement makes something to display."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("show"), name))):
            return name not in ("glue", "guess")
    return False


@every_chapter
def test_each_question_is_asked_before_its_answer_is_measured(path):
    turns = []  # in turn, since a page pairs an answer with the question before it
    for cell in read(path).cells:
        if cell.cell_type == "code":
            names = re.findall(r'show\.guess\(\s*"([^"]+)"', cell.source)
            assert all(name.startswith(f"{path.stem[:2]}-guess-") for name in names)
            turns += ["answer"] * len(names)
        else:
            questions = re.findall(r"(?:\A|\n\n)\*\*Predict:", cell.source)
            turns += ["question"] * len(questions)
    assert turns == ["question", "answer"] * (len(turns) // 2) and len(turns) >= 4


def solutions(path):
    """The code of each solution's cells, by the label of its exercise."""
    found, label = {}, None
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            directive = r"^```\{solution-(start|end)\} ?(\S*)"
            for what, name in re.findall(directive, cell.source, re.MULTILINE):
                label = name if what == "start" else None
                if label is not None:
                    found[label] = []
        elif label is not None:
            found[label].append(cell.source)
    return found


@every_chapter
def test_every_solution_asserts_its_claim(path):
    prose = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    label = re.compile(r"^```\{exercise\}\n:label: (\S+)", re.MULTILINE)
    exercises = label.findall("\n".join(prose))
    found = solutions(path)
    assert exercises and list(found) == exercises
    for label, sources in found.items():
        # What a cell writes to a file asserts nothing on the page.
        code = "\n".join(TransformerManager().transform_cell(s) for s in sources)
        nodes = ast.walk(ast.parse(code))
        assert any(isinstance(node, ast.Assert) for node in nodes), label


@every_chapter
def test_begins_with_the_cell_that_all_share(path):
    cell, shared = code_cells(path)[0], code_cells(CHAPTERS[0])[0]
    assert "import cdopt_tutorial" not in shared.source
    assert 'find_spec("cdopt_tutorial")' in shared.source
    assert len(shared.source.splitlines()) <= INSTALL_LINES
    assert cell.source == shared.source
    assert cell.metadata == shared.metadata == {"tags": ["remove-cell"]}


@pytest.fixture
def begin(monkeypatch):
    """Runs the first cell; returns the result, and the arguments of pip."""
    monkeypatch.setattr("builtins.input", lambda prompt: "https://books.example/a")

    def run():
        shell, installed = InteractiveShell(), []
        shell.register_magic_function(installed.append, magic_name="pip")
        return shell.run_cell(code_cells(CHAPTERS[0])[0].source), installed

    return run


def test_first_cell_does_nothing_where_the_package_is(begin, capsys):
    done, installed = begin()
    assert done.success and installed == []
    assert capsys.readouterr() == ("", "")


def test_first_cell_installs_on_colab_only(begin, monkeypatch):
    find = importlib.util.find_spec

    def find_others(name):
        return None if name == "cdopt_tutorial" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    done, installed = begin()
    assert isinstance(done.error_in_exec, ImportError) and installed == []
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    done, (line,) = begin()
    assert done.success
    assert "--no-deps git+https://books.example/a " in line
