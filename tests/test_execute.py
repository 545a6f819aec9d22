"""Running chapters: when a result is reused, and what happens if one fails."""

import ast
import os
import re
import sys
from types import SimpleNamespace

import grimp
import nbformat
import psutil
import pytest
from books import run, write_chapter
from IPython.core.inputtransformer2 import TransformerManager
from nbformat.v4 import new_code_cell, new_notebook, new_output
from running import Script, wait_for_end

from cdopt_tutorial.publish import execute as module
from cdopt_tutorial.publish.chapter import (
    code_cells,
    read_chapter,
    shortened,
    with_outputs,
)
from cdopt_tutorial.publish.execute import digest, find_result, used_files
from cdopt_tutorial.publish.project import Project

# Files of a book, and the word in a chapter's code that makes its result depend on one.
FILES = {
    "cdopt_tutorial/__init__.py": "",
    "cdopt_tutorial/plots/a.mplstyle": "",
    "cdopt_tutorial/hybrid/system.py": "hybrid",
    "cdopt_tutorial/commands/train.py": "-m cdopt_tutorial",
    "cdopt_tutorial/publish/render.py": None,
    "constraints.txt": "",
    "README.md": None,
}
CODE = "from cdopt_tutorial import hybrid", "!{torchrun} -m cdopt_tutorial train", "1"


@pytest.fixture
def book(tmp_path) -> Project:
    """A book of its own: a package, constraints, and no chapters yet."""
    project = Project(tmp_path / "a book")
    for name in FILES:
        (project.root / name).parent.mkdir(parents=True, exist_ok=True)
        (project.root / name).touch()
    (project.root / "notebooks").mkdir()
    return project


def printed(notebook) -> str:
    """The text outputs of a chapter's cells."""
    outputs = [out for cell in code_cells(notebook) for out in cell.outputs]
    return "".join(out.get("text", "") for out in outputs)


def test_a_result_is_reused_until_its_code_changes(book, no_kernel):
    path = write_chapter(book, "import time; print(time.time_ns())")
    first, second = (run(book, path)[0] for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert printed(first.notebook) == printed(second.notebook)
    assert 0 < first.seconds == second.seconds
    write_chapter(book, "import time; print(time.time_ns())", prose="Other.")
    assert run(book, path)[0].cached
    assert not run(book, path, force=True)[0].cached
    write_chapter(book, "print(2)")
    (done,) = run(book, path)
    assert not done.cached and printed(done.notebook) == "2\n"


@pytest.mark.parametrize("code", CODE)
def test_a_result_follows_what_its_chapter_may_use_and_nothing_else(book, code):
    chapter = read_chapter(write_chapter(book, code))
    for name, word in FILES.items():
        before = digest(book, chapter, "cpu")
        (book.root / name).write_text("# a change\n")
        used = word is not None and word in code
        assert (digest(book, chapter, "cpu") != before) == used, name


def test_a_result_follows_all_that_its_chapter_imports(project):
    """Directly or not, within functions too."""
    graph = grimp.build_graph("cdopt_tutorial")
    for path in project.chapters():
        chapter = read_chapter(path)
        cells = [
            TransformerManager().transform_cell(c.source) for c in code_cells(chapter)
        ]
        named = set()
        for node in ast.walk(ast.parse("\n".join(cells))):
            if isinstance(node, ast.ImportFrom):
                named |= {f"{node.module}.{alias.name}" for alias in node.names}
                named.add(node.module)
        named &= graph.modules
        assert len(named) > 5
        for name in named.union(*map(graph.find_upstream_modules, named)):
            file = project.root.joinpath(*name.split("."))
            files = {file.with_suffix(".py"), file / "__init__.py"}
            assert files & {*used_files(project.package, chapter)}, name


@pytest.mark.parametrize("name", "hybrid reinforce rnn rollouts shard".split())
def test_a_result_follows_all_that_its_command_imports(project, name):
    graph, module = (
        grimp.build_graph("cdopt_tutorial"),
        f"cdopt_tutorial.commands.{name}",
    )
    chapter = new_notebook(cells=[new_code_cell(f"!python -m cdopt_tutorial {name}")])
    used = {*used_files(project.package, chapter)}
    for imported in {module} | graph.find_upstream_modules(module):
        file = project.root.joinpath(*imported.split("."))
        assert used & {file.with_suffix(".py"), file / "__init__.py"}, imported


def test_digest_follows_device_python_and_libraries(book, monkeypatch):
    chapter = read_chapter(write_chapter(book, "1"))
    seen = {digest(book, chapter, "cpu"), digest(book, chapter, "cuda")}
    libraries = "torch cdopt geoopt gymnasium ipython numpy scikit-learn ray".split()
    for library in libraries:
        for found in ([SimpleNamespace(version="9.9")], []):  # or not installed

            def find(name, library=library, found=found):
                return found if name == library else [SimpleNamespace(version="1.0")]

            monkeypatch.setattr(module, "distributions", find)
            seen.add(digest(book, chapter, "cpu"))
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert len(seen | {digest(book, chapter, "cpu")}) == 3 + 2 * len(libraries)


def test_a_short_run_is_beside_that_of_the_chapter(book, no_kernel):
    path = write_chapter(book, "n = 9", "print(n)", parameters=True, short={"n": 2})
    chapter = read_chapter(path)
    for at_once, version, text in (2, shortened(chapter), "2\n"), (1, chapter, "9\n"):
        for cached in (False, True):
            (done,) = module.execute([(path, version)], project=book, at_once=at_once)
            assert done.cached == cached and printed(done.notebook) == text
        short = find_result(book, chapter, "cpu", short=True)
        assert printed(short) == text  # of the chapter itself, once there is one


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
    for done in run(book, at_once=2):
        assert done.error is None and printed(done.notebook) == "1\n"


def test_a_chapter_that_fails_says_where_and_stops_no_other(
    book, tmp_path, monkeypatch, capsys
):
    """The other runs in this Python, in a temporary folder, and finds its device."""
    # A reader's startup file and kernel must not change a result.
    for file in "profile_default/startup/00.py", "kernels/python3/kernel.json":
        (own := tmp_path / "own" / file).parent.mkdir(parents=True)
        own.write_text("own = {}\n")
    for name in "IPYTHONDIR", "JUPYTER_PATH":
        monkeypatch.setenv(name, str(tmp_path / "own"))
    bad = write_chapter(
        book, "print('so far')", " \n", "y = 0\n1 / y", "print('never')", name="01_bad"
    )  # of no code there is nothing to run
    good = write_chapter(
        book,
        "import os, sys; print(sys.executable)",
        "open('left.txt', 'w').close(); print(os.environ['CDOPT_TUTORIAL_DEVICE'])",
        "print('own' in globals())",
        name="02_good",
    )
    failed, passed = run(book, bad, good, device="meta")
    where = "notebooks/01_bad.ipynb failed in code cell 2 of 3: y = 0"
    assert failed.error.startswith(where) and "\x1b" not in failed.error
    assert failed.why == "ZeroDivisionError: division by zero"
    _, _, place = failed.error.rpartition("kept as far as it ran: ")
    kept = nbformat.read(book.root / place, 4)
    assert printed(kept) == "so far\n"
    assert kept.metadata["failed"] == f"{where}\n{failed.why}"
    said = capsys.readouterr().out
    assert re.search(r"^  01_bad +\d\.\d s  \[2/3\] y = 0$", said, re.M)
    assert passed.error is None
    assert printed(passed.notebook) == f"{sys.executable}\nmeta\nFalse\n"
    assert not list(book.root.rglob("left.txt"))
    assert {*good.parent.iterdir()} == {bad, good}


def test_a_failed_run_is_run_again_until_it_succeeds(book, no_kernel):
    path = write_chapter(book, "1 / 0")
    assert not any(run(book)[0].cached for _ in range(2))
    assert "failed" in find_result(book, read_chapter(path), "cpu").metadata


def test_a_failed_run_hides_no_good_one(book, no_kernel, monkeypatch):
    path = write_chapter(book, "import os; assert 'BUSY' not in os.environ")
    run(book)
    monkeypatch.setenv("BUSY", "1")
    assert run(book, path, force=True)[0].error
    assert run(book, path)[0].cached
    assert "failed" not in find_result(book, read_chapter(path), "cpu").metadata


def test_hidden_files_are_neither_chapters_nor_code(book):
    chapter = read_chapter(write_chapter(book, "1"))
    before = digest(book, chapter, "cpu"), book.chapters()
    copies = book.package / ".ipynb_checkpoints"
    copies.mkdir()
    for file in copies / "a.py", book.root / "notebooks/._01_a.ipynb":
        file.touch()
    (book.package / ".#a.py").symlink_to("nowhere")
    assert (digest(book, chapter, "cpu"), book.chapters()) == before


TIMED_OUT = "A cell timed out while it was being executed, after 5 seconds."
# What ends a chapter, and the reason.
ENDS = {
    "x, y = 2, [1, 7]\nassert x == 3 or y[0] > 1": "AssertionError: x == 3 or y[0] > 1:"
    " {'x': 2, 'y': [1, 7]}",
    "assert False, 'words of its own'": "AssertionError: words of its own",
    "import time; time.sleep(600)": TIMED_OUT,
    "import os; os._exit(3)": "Kernel died",
}


@pytest.mark.parametrize("code, why", ENDS.items())
def test_whatever_ends_a_chapter_is_its_failure(book, code, why):
    (done,) = run(book, write_chapter(book, code), cell_timeout=5)
    assert done.why == why and "code cell 1 of 1" in done.error


def test_no_process_below_has_a_readers_settings(book, monkeypatch):
    for name in "PYTHONOPTIMIZE", "PYTHONWARNINGS", "MPLBACKEND", "MPLCONFIGDIR":
        monkeypatch.setenv(name, "1")
    code = "!env | grep -E '^(PYTHON(OPT|WARN)|MPL.*=1)'\nimport os\n"
    (done,) = run(book, write_chapter(book, f"{code}print(len(os.environ) > 2)"))
    assert printed(done.notebook) == "True\n"


def test_kernel_that_does_not_start_is_a_failure(book, monkeypatch):
    kernel = {"argv": [sys.executable, "-c", ""], "display_name": "", "language": ""}
    monkeypatch.setattr("ipykernel.kernelspec.get_kernel_dict", lambda: kernel)
    (done,) = run(book, write_chapter(book, "1"))
    assert "failed in no cell: the kernel did not start" in done.error


def test_whatever_a_chapter_leaves_behind_ends_with_it(book):
    code = "import subprocess\nleft = subprocess.Popen(['sleep', '900'], "
    code += "start_new_session=True)\nprint(left.pid)"
    daemon = "%%bash\nnohup setsid sleep 900 > /dev/null 2>&1 &\necho $!"
    (done,) = run(book, write_chapter(book, code, daemon))
    pids = [int(pid) for pid in printed(done.notebook).split()]
    assert len(pids) == 2
    wait_for_end([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])


def test_a_notebook_of_an_older_format_runs_as_well(book, no_kernel):
    path = write_chapter(book, "print(1)", "%%writefile bare_a.py\nprint(6)\n")
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 0
    path.write_text(nbformat.writes(notebook))
    (done,) = run(book, path)
    page = with_outputs(read_chapter(path), done.notebook)
    assert printed(page) == "1\n" and "Download bare_a.py" in page.cells[-1].source


def test_old_outputs_are_no_figures(book):
    path = write_chapter(book, "2")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].outputs = [new_output("stream", text="old")]
    nbformat.write(notebook, path)
    assert printed(read_chapter(path)) == ""


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
