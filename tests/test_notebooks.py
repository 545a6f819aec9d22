"""The chapters: they run through, and keep the rules of CONTRIBUTING.md."""

import ast

import nbformat
import pytest

from cdopt_tutorial.publish.execute import execute
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.publish.reference import Reference

CELLS = range(20, 33)  # without the exercises and what follows
LINES = 18
COLUMNS = 78

CHAPTERS = this_project().chapters()
every_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def test_there_are_chapters():
    assert CHAPTERS


@pytest.fixture(scope="module", params=CHAPTERS, ids=lambda path: path.stem)
def done(request, project):
    """What became of a chapter; the run is made once, if there is no result yet."""
    return execute([request.param], project=project)[0]


def test_runs_through(done):
    assert done.error is None, done.error


def test_claims_the_figures_of_the_reference(done, project):
    # Also of a chapter that failed: what moved says why.
    drift = Reference(project).drift(
        done.path.stem, "full", done.figures, complete=done.error is None
    )
    assert not drift, "\n".join(map(str, drift))


@every_chapter
def test_stores_no_outputs(path):
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None


@every_chapter
def test_code_cells_are_short_and_narrow(path):
    for cell in code_cells(path):
        lines = cell.source.splitlines()
        assert 1 <= len(lines) <= LINES, cell.source
        assert max(map(len, lines)) <= COLUMNS, cell.source


@every_chapter
def test_what_is_shown_is_the_last_in_its_cell(path):
    # Jupyter displays the last expression only; another one is lost without a word.
    for cell in code_cells(path):
        if cell.source.startswith("%%"):
            continue
        *others, _ = ast.parse(cell.source).body
        lost = [ast.unparse(each) for each in others if shows(each)]
        assert not lost, cell.source


def shows(statement):
    """Whether it makes something to be displayed."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("show"), name))):
            return name != "glue"
    return False


@every_chapter
def test_one_cell_holds_the_parameters(path):
    tags = [cell.metadata.get("tags", []) for cell in code_cells(path)]
    assert sum("parameters" in t for t in tags) == 1


@every_chapter
def test_number_of_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    exercises = [i for i, cell in enumerate(cells) if "## Exercises" in cell.source]
    assert len(exercises) == 1
    assert exercises[0] in CELLS


@every_chapter
def test_names_the_kernel_that_every_reader_has(path):
    metadata = nbformat.read(path, as_version=4).metadata
    assert metadata.kernelspec.name == "python3"
