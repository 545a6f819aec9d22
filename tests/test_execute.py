"""Running chapters: when a result is reused, and what happens if one fails."""

import ast
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import grimp
import nbformat
import psutil
import pytest
from books import run, write_chapter
from IPython.core.inputtransformer2 import TransformerManager
from nbformat.v4 import new_code_cell, new_notebook, new_output
from running import Script, wait_for_end

from cdopt_tutorial.commands.train import SYSTEMS
from cdopt_tutorial.publish import execute as module
from cdopt_tutorial.publish.chapter import (
    code_cells,
    programs,
    read,
    read_chapter,
    with_outputs,
)
from cdopt_tutorial.publish.execute import find_result, result_file, used_files
from cdopt_tutorial.publish.project import Project

# Files of a book, and the word in a chapter's code that makes its result depend on one.
FILES = {
    "cdopt_tutorial/__init__.py": "",
    "cdopt_tutorial/plots/a.mplstyle": "",
    "cdopt_tutorial/hybrid/system.py": "hybrid",
    "cdopt_tutorial/commands/train.py": "-m cdopt_tutorial",
    "cdopt_tutorial/publish/render.py": None,
    "cdopt_tutorial/.a.py": None,
    "cdopt_tutorial/.ipynb_checkpoints/a.py": None,
    "notebooks/._01_a.ipynb": None,
    "constraints.txt": "",
}
TRAIN = "cdopt_tutorial.commands.train"
CODE = "from cdopt_tutorial import hybrid", "!{torchrun} -m cdopt_tutorial train", "1"


@pytest.fixture
def book(tmp_path) -> Project:
    """A book of its own: a package, constraints, and no chapters yet."""
    project = Project(tmp_path / "a book")
    for name in FILES:
        (project.root / name).parent.mkdir(parents=True, exist_ok=True)
        (project.root / name).touch()
    return project


def printed(notebook) -> str:
    """The text outputs of a chapter's cells."""
    outputs = [out for cell in code_cells(notebook) for out in cell.outputs]
    return "".join(out.get("text", "") for out in outputs)


def test_a_result_is_reused_until_its_code_changes(book, no_kernel, capsys):
    path = write_chapter(book, code := "import time; print(time.time_ns())")
    first, second = (printed(*run(book, path)) for _ in range(2))
    write_chapter(book, code, prose="Other.")
    assert first == second == printed(*run(book, path))
    assert capsys.readouterr().out.count("reused the result of a run of 0.0 s") == 2
    assert printed(*run(book, path, force=True)) != first
    write_chapter(book, "print(2)")
    assert printed(*run(book, path)) == "2\n"


@pytest.mark.parametrize("code", CODE)
def test_a_result_follows_what_its_chapter_may_use_and_nothing_else(book, code):
    chapter = read_chapter(path := write_chapter(book, code))
    assert book.chapters() == [path]
    for name, word in FILES.items():
        before = result_file(book, chapter)
        (book.root / name).write_text("# a change\n")
        used = word is not None and word in code
        assert (result_file(book, chapter) != before) == used, name


@pytest.mark.parametrize("name", [*SYSTEMS, "a chapter"])
def test_a_result_follows_all_that_its_code_imports(project, name):
    """Directly or not, within functions too."""
    if name in SYSTEMS:
        command = new_code_cell(f"!python -m cdopt_tutorial {name}")
        folder = f"cdopt_tutorial.{SYSTEMS[name].folder}"
        imports_of = [(new_notebook(cells=[command]), {folder, TRAIN})]
    else:
        chapters = map(read_chapter, project.chapters())
        imports_of = [(chapter, imported(chapter)) for chapter in chapters]
    graph = grimp.build_graph("cdopt_tutorial")
    for chapter, names in imports_of:
        used, named = {*used_files(project.root, chapter)}, names & graph.modules
        assert len(named) > 1
        for each in named.union(*map(graph.find_upstream_modules, named)):
            file = Path(*each.split("."))
            assert used & {file.with_suffix(".py"), file / "__init__.py"}, each


def imported(chapter) -> set[str]:
    """What a chapter imports by name."""
    shell = TransformerManager()
    cells = [shell.transform_cell(cell.source) for cell in code_cells(chapter)]
    nodes = ast.walk(ast.parse("\n".join(cells)))
    nodes = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {f"{n.module}.{alias.name}" for n in nodes for alias in n.names}
    return names | {node.module for node in nodes}


def test_a_result_follows_the_device_python_and_libraries(book, monkeypatch):
    chapter = read_chapter(write_chapter(book, "1"))
    seen = {result_file(book, chapter)}
    book.device = "cuda"
    seen.add(result_file(book, chapter))
    for there in ([SimpleNamespace(version="9.9")], []):  # or not installed
        monkeypatch.setattr(
            module, "distributions", lambda name, there=there: there * (name == "ray")
        )
        seen.add(result_file(book, chapter))
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert len(seen | {result_file(book, chapter)}) == 5


def test_a_short_run_is_beside_that_of_the_chapter(book, no_kernel):
    path = write_chapter(book, "n = 9", "print(n)", short={"n": 2})
    for short, text in (True, "2\n"), (False, "9\n"), (True, "9\n"):
        assert printed(*run(book, path, short=short)) == text
        found = find_result(book, read_chapter(path))
        assert printed(found) == text  # of the chapter itself, once there is one


def test_two_at_once_have_a_core_each(book):
    wait = """
import os, time
from pathlib import Path
place = Path(os.environ["TMPDIR"]).parent
(place / {own!r}).touch()
while not (place / {other!r}).exists():
    time.sleep(0.1)
print(os.environ["OMP_NUM_THREADS"])
"""
    for own, other in ("01_a", "02_b"), ("02_b", "01_a"):
        write_chapter(book, wait.format(own=own, other=other), name=own)
    for done in run(book, short=True):
        assert printed(done) == "1\n"


def test_a_chapter_that_fails_says_where_and_stops_no_other(
    book, tmp_path, monkeypatch, capsys
):
    """The other runs in this Python, in a temporary folder, and finds its device."""
    # A reader's startup file, kernel and settings must not change a result.
    for file in "profile_default/startup/00.py", "kernels/python3/kernel.json":
        (own := tmp_path / "own" / file).parent.mkdir(parents=True)
        own.write_text("own = {}\n")
    for name in "IPYTHONDIR", "JUPYTER_PATH":
        monkeypatch.setenv(name, str(tmp_path / "own"))
    settings = "PYTHONOPTIMIZE PYTHONWARNINGS MPLBACKEND MPLCONFIGDIR RAY_ADDRESS"
    for name in settings.split():
        monkeypatch.setenv(name, "1")
    code = "print('so far')", "y = 0\n1 / y", "print('never')"
    bad = write_chapter(book, *code, name="01_bad")
    good = write_chapter(
        book,
        "import os, sys; print(sys.executable)",
        "open('left.txt', 'w').close(); print(os.environ['CDOPT_TUTORIAL_DEVICE'])",
        "!env | grep -E '^(PYTHON(OPT|WARN)|MPL.*=1|RAY)'",
        "print('own' in globals())",
        name="02_good",
    )
    book.device = "meta"
    failed, passed = run(book, bad, good)
    where = "notebooks/01_bad.ipynb failed in code cell 2 of 3: y = 0"
    why = "ZeroDivisionError: division by zero"
    assert failed.metadata["failed"] == f"{where}\n{why}"
    said = capsys.readouterr()
    assert f"\n{where}\n" in said.err and "\x1b" not in said.err
    _, _, place = said.err.rstrip().rpartition("kept as far as it ran: ")
    assert read(book.root / place) == failed and printed(failed) == "so far\n"
    assert re.search(r"^  01_bad +\d\.\d s  \[2/3\] y = 0$", said.out, re.M)
    assert printed(passed) == f"{sys.executable}\nmeta\nFalse\n"
    assert not list(book.root.rglob("left.txt"))
    assert book.chapters() == [bad, good]


def test_a_failed_run_is_run_again_and_hides_no_good_short_one(
    book, no_kernel, monkeypatch
):
    code = "import os; assert n == 2 or 'BUSY' not in os.environ"
    chapter = read_chapter(write_chapter(book, "n = 9", code, short={"n": 2}))
    monkeypatch.setenv("BUSY", "1")
    for _ in range(2):
        assert "failed" in run(book)[0].metadata
        assert "failed" in find_result(book, chapter).metadata
    run(book, short=True)
    assert "failed" not in find_result(book, chapter).metadata
    monkeypatch.delenv("BUSY")
    assert "failed" not in run(book)[0].metadata


TIMED_OUT = "A cell timed out while it was being executed, after 5 seconds."
# What ends a chapter, and the reason.
ENDS = {
    "x = 2\nassert x == 3": "AssertionError: x = 2, x == 3 = False",
    "assert False, 'words of its own'": "AssertionError: words of its own",
    # Of a long one, the begin.
    "x = 'a' * 999\nassert x < ''": "AssertionError: x = '".ljust(516, "a"),
    "import time; time.sleep(600)": TIMED_OUT,
    "import os; os._exit(3)": "Kernel died",
}


@pytest.mark.parametrize("code", ENDS)
def test_whatever_ends_a_chapter_is_its_failure(book, code, monkeypatch):
    monkeypatch.setattr(module, "CELL_TIMEOUT", 5)
    (done,) = run(book, write_chapter(book, code))
    where, said = done.metadata["failed"].splitlines()
    assert said == ENDS[code] and "code cell 1 of 1" in where


def test_kernel_that_does_not_start_is_a_failure(book, monkeypatch):
    kernel = {"argv": [sys.executable, "-c", ""], "display_name": "", "language": ""}
    monkeypatch.setattr("ipykernel.kernelspec.get_kernel_dict", lambda: kernel)
    (done,) = run(book, write_chapter(book, "1"))
    assert "in no cell: the kernel did not start" in done.metadata["failed"]


def test_whatever_a_chapter_leaves_behind_ends_with_it(book):
    code = "import subprocess\nleft = subprocess.Popen(['sleep', '900'], "
    code += "start_new_session=True)\nprint(left.pid)"
    daemon = "%%bash\nnohup setsid sleep 900 > /dev/null 2>&1 &\necho $!"
    (done,) = run(book, write_chapter(book, code, daemon))
    pids = [int(pid) for pid in printed(done).split()]
    assert len(pids) == 2
    wait_for_end([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])


def test_a_notebook_of_an_older_format_is_read_without_its_outputs(book):
    path = write_chapter(book, "print(1)", "%%writefile bare_a.py\nprint(6)\n")
    notebook = nbformat.read(path, 4)
    notebook.cells[1].outputs = [new_output("stream", text="old")]
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 0
    path.write_text(nbformat.writes(notebook))
    page = with_outputs(read_chapter(path), read_chapter(path))
    assert printed(page) == "" and "Download bare_a.py" in page.cells[-1].source


@pytest.mark.parametrize("code", ["", "x = 1", "%%writefile a/b.py\n1"])
def test_a_cell_tagged_bare_that_writes_no_program_has_no_link(code):
    cell = new_code_cell(code, metadata={"tags": ["bare"]})
    assert programs(new_notebook(cells=[cell])) == {}


def test_whoever_kills_it_leaves_no_kernel(book, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    write_chapter(book, "print(1)", "import time; time.sleep(600)")
    code = f"""
from pathlib import Path
from books import run
from cdopt_tutorial.publish.project import Project
run(Project(Path({str(book.root)!r})))
"""
    with Script(code, tmp_path) as process:
        process.wait_for("[2/2]")
        kernels = process.below()
        process.kill()
    assert kernels
    wait_for_end(kernels)
