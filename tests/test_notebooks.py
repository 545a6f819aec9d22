"""The chapters' notebooks follow the rules of CONTRIBUTING.md."""

import ast
import importlib.util
import re
import sys
from functools import cache, partial
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
CELLS = range(20, 57)
INSTALL_LINES = 10
LINES = 18
COLUMNS = 78

# The last line of a traceback, an exception's repr, and a worker's failure.
ERROR = re.compile(
    r"Traceback \(most recent call last\)"
    r"|\b([A-Z]\w*)?(Error|Exception|Interrupt|Exit|StopIteration)\b *[:(]"
    r"|^\w+ (raised [A-Z]|exited with code|was killed by)"
    r"|\(stopped: \w+\)",
    re.MULTILINE,
)

# Of an exercise, whose label is in the next line, or of its solution.
DIRECTIVE = r"(?m)^```\{(exercise|solution-start|solution-end)\}(?: |\n:label: )?(\S*)"

CHAPTERS = this_project().chapters()
every_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


@cache
def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return chapters.code_cells(read(path))


def parsed(source: str) -> ast.Module:
    """The statements of a cell, in which magics are calls."""
    return ast.parse(TransformerManager().transform_cell(source))


def shown(output) -> str:
    """What a reader sees of an output, as text."""
    match output.output_type:
        case "stream":
            return output.text
        case "error":
            return "Traceback (most recent call last)"
    texts = [text for kind, text in output.data.items() if kind.startswith("text/")]
    # Source code that is shown may name errors.
    text = re.sub(r"^(`{3,}).*?^\1", "", "\n".join(texts), flags=re.M | re.S)
    return re.sub(r"<[^>]*>", "\n", text)


@every_chapter
def test_shows_no_error_that_its_cell_does_not_announce(path, project):
    ran = find_result(project, read_chapter(path))
    asked = f"run `cdopt-tutorial execute {project.relative(path)}`"
    assert ran is not None and "failed" not in ran.metadata, asked
    for cell in chapters.code_cells(ran):
        lines = [line for out in cell.outputs for line in shown(out).splitlines()]
        errors = [line for line in lines if ERROR.search(line)]
        assert bool(errors) == tagged(cell, "prints-error"), (cell.source, errors)


@every_chapter
def test_has_the_form_of_every_chapter(path):
    chapter, cells = read_chapter(path), read(path).cells
    kernel = read(path).metadata.get("kernelspec", {}).get("name")
    assert kernel == "python3", "name of the kernel"
    sources = [c.source for c in code_cells(path) if tagged(c, "parameters")]
    assert len(sources) == 1, "one cell is tagged `parameters`"
    names = {*re.findall(r"^(\w+)(?:: .+?)? = ", sources[0], re.MULTILINE)}
    short = chapter.metadata.get("cdopt_tutorial", {}).get("short")
    assert short, "it needs a short profile"
    assert short.keys() <= names, "parameters of its short profile"
    exercises = [i for i, cell in enumerate(cells) if "## Exercises" in cell.source]
    assert len(exercises) == 1, "one cell has the heading Exercises"
    assert exercises[0] - 1 in CELLS, f"cells before the exercises: {CELLS}"
    code = "\n".join(cell.source for cell in code_cells(path))
    names = {*re.findall(r"""["'](\d\d)-""", code)}
    assert names == {path.stem[:2]}, "names of figures"
    cell, shared = code_cells(path)[0], code_cells(CHAPTERS[0])[0]
    assert "import cdopt_tutorial" not in shared.source
    assert len(shared.source.splitlines()) <= INSTALL_LINES
    assert cell.source == shared.source, "the first cell is that of chapter 1"
    assert cell.metadata == shared.metadata == {"tags": ["remove-cell"]}


@every_chapter
def test_code_cells_are_empty_short_and_narrow(path):
    for cell in code_cells(path):
        clean = (cell.outputs, cell.execution_count) == ([], None)
        assert clean, f"saved with outputs: {cell.source}"
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
        *others, _ = parsed(cell.source).body
        lost = re.compile(r"show\.(?!glue|guess)")
        assert not [*filter(lost.match, map(ast.unparse, others))], cell.source


@every_chapter
def test_each_question_is_asked_before_its_answer_is_measured(path):
    turns = []  # in turn, since a page pairs an answer with the question before it
    for cell in read(path).cells:
        if cell.cell_type == "code":
            names = re.findall(r'show\.guess\(\s*"([^"]+)"', cell.source)
            form = re.compile(rf"{path.stem[:2]}-guess-[\w-]+")
            assert all(map(form.fullmatch, names)), names
            turns += ["answer"] * len(names)
        else:
            questions = re.findall(r"(?:\A|\n\n)\*\*Predict:", cell.source)
            turns += ["question"] * len(questions)
    asked = "**Predict:** and show.guess take turns, twice at least"
    pairs = len(turns) // 2
    assert turns == ["question", "answer"] * pairs and pairs >= 2, asked


@every_chapter
def test_every_solution_asserts_its_claim(path):
    label, exercises, solutions = "", [], {}
    for cell in read(path).cells:
        if cell.cell_type == "code":
            if label:
                solutions[label].append(cell.source)
            continue
        for kind, name in re.findall(DIRECTIVE, cell.source):
            label = name if kind == "solution-start" else ""
            if kind == "exercise":
                exercises.append(name)
            elif label:
                solutions[label] = []
    asked = "exercises, and a solution to each, in their order"
    assert exercises and list(solutions) == exercises, asked
    for label, sources in solutions.items():
        # What a cell writes to a file asserts nothing on the page.
        nodes = [node for source in sources for node in ast.walk(parsed(source))]
        assert any(isinstance(node, ast.Assert) for node in nodes), label


def test_first_cell_installs_the_package_where_it_is_not_and_on_colab_only(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "https://books.example/a")
    shell, installed = InteractiveShell(), []
    shell.register_magic_function(installed.append, magic_name="pip")
    begin = partial(shell.run_cell, code_cells(CHAPTERS[0])[0].source)
    assert begin().success and not installed
    find = importlib.util.find_spec
    missing = lambda name: None if name == "cdopt_tutorial" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert isinstance(begin().error_in_exec, ImportError) and not installed
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    assert begin().success
    assert "--no-deps git+https://books.example/a " in installed[0]
