"""Run chapters once, and keep each result for the pages and for the tests.

A result is a file in `_build/results`, whose name is a hash of all that decides it.
"""

import atexit
import hashlib
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError
from nbformat import NotebookNode
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from cdopt_tutorial import scratch, whole_file
from cdopt_tutorial.publish import asserts
from cdopt_tutorial.publish.chapter import code_cells, read, read_chapter, shortened
from cdopt_tutorial.publish.project import Project

FAILED = ".failed.ipynb"  # beside a good run, if there is one
CELL_TIMEOUT = 3600  # seconds after which one cell counts as hung
# A reader's settings, such as PYTHONOPTIMIZE: no result may depend on them.
_SETTINGS = re.compile(
    "PYTHON(?!PATH)|IPYTHON|MPL|MATPLOTLIB|RAY_|PYTORCH_JIT|TORCHDYNAMO_|TORCH_COMPILE_"
)
# Libraries whose versions decide a result; without Ray chapter 7 differs.
_LIBRARIES = "torch cdopt geoopt gymnasium ipython numpy scikit-learn ray".split()
# Folders of systems, which the others may not import.
_SYSTEMS = "dissolving hybrid parameter_server reinforce rollouts sharding".split()
_KINDS = ".py", ".json", ".mplstyle", ".svg"
# What a system imports, and the systems of commands that have other names.
_IMPLIED = {"rollouts": "reinforce", "rnn": "parameter_server", "shard": "sharding"}
# Has a process that was just forked killed when its parent ends.
end_with_parent = partial(_prctl_pr_set_pdeathsig, signal.SIGKILL)


def result_file(project: Project, notebook: NotebookNode) -> Path:
    """Return where a chapter's result is, or would be, by all that decides it."""
    code = [(c.source, c.metadata.get("tags")) for c in code_cells(notebook)]
    versions = [[d.version for d in distributions(name=name)] for name in _LIBRARIES]
    files = [*used_files(project.root, notebook), Path("constraints.txt")]
    contents = [(f"{file}", (project.root / file).read_bytes()) for file in files]
    facts = code, platform.python_version(), versions, project.device, contents
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return project.results / f"{name}.ipynb"


def used_files(root: Path, notebook: NotebookNode) -> list[Path]:
    """Return the package's files without the folders that a chapter does not name.

    A chapter that runs a command uses all commands; none uses what publishes it.
    """
    code = "\n".join(cell.source for cell in code_cells(notebook))
    words = {*re.findall(r"\w+", re.sub(r"-m\W+cdopt_tutorial", "commands", code))}
    words |= {_IMPLIED[word] for word in words & _IMPLIED.keys()}
    unused = {*_SYSTEMS, "commands", "publish", ".ipynb_checkpoints"} - words
    # Editors leave hidden files beside the others.
    files = (root / "cdopt_tutorial").rglob("[!.]*.*")
    names = [file.relative_to(root) for file in files if file.suffix in _KINDS]
    return sorted(name for name in names if not unused & {*name.parts})


def find_result(project: Project, notebook: NotebookNode) -> NotebookNode | None:
    """Return a chapter's valid run, which may be short in a short project.

    One that failed, with `failed` in its metadata, is returned if there is no other.
    """
    versions = [notebook, *([shortened(notebook)] if project.short else [])]
    files = [result_file(project, version) for version in versions]
    files += [file.with_suffix(FAILED) for file in files]
    return next((read(file) for file in files if file.exists()), None)


def execute(
    project: Project, paths: Sequence[Path], *, force: bool = False
) -> list[NotebookNode]:
    """Run those of the chapters that have no valid result; with `force`, all.

    In a short project two run at once, on a core each. Return the results, whose
    metadata have the `seconds` that the run took and, if it `failed`, where and why. A
    failure does not stop the others; a result that can't be written is an OSError.
    """
    chapters = [read_chapter(path) for path in paths]
    project.results.mkdir(parents=True, exist_ok=True)
    scratch.folder()  # before several threads ask for it
    variables = {"CDOPT_TUTORIAL_DEVICE": project.device}
    variables |= {"OMP_NUM_THREADS": "1"} if project.short else {}

    def finish(path: Path, chapter: NotebookNode) -> NotebookNode:
        name = project.relative(path)
        ran = None if force else find_result(project, chapter)
        if ran and "failed" not in ran.metadata:
            seconds = ran.metadata["seconds"]
            print(f"{name}: reused the result of a run of {seconds:.1f} s")
            return ran
        chapter = shortened(chapter) if project.short else chapter
        file = result_file(project, chapter)  # before the run, for its sources
        _run(name, chapter, variables)
        if "failed" in chapter.metadata:  # beside a good run, if there is one
            file = file.with_suffix(FAILED)
            print(f"kept as far as it ran: {project.relative(file)}", file=sys.stderr)
        whole_file.write(file, nbformat.writes(chapter).encode())
        return chapter

    # In threads, or nbclient would handle the process's signals.
    with ThreadPoolExecutor(2 if project.short else 1) as threads:
        return list(threads.map(finish, paths, chapters))


def _run(name: str, notebook: NotebookNode, variables: dict[str, str]) -> None:
    """Run one chapter, in place; print its error, and note it in the metadata.

    A line is printed as each cell of code begins: the time, its number, its first line.
    """
    begin, cells = time.monotonic(), code_cells(notebook)
    where = f"{name} failed in no cell: the kernel did not start"

    def on_cell(cell: NotebookNode, cell_index: int) -> None:
        nonlocal where
        number, first = cells.index(cell) + 1, cell.source.strip().splitlines()[0]
        where = f"{name} failed in code cell {number} of {len(cells)}: {first}"
        at = f"{time.monotonic() - begin:6.1f} s  [{number}/{len(cells)}]"
        print(f"  {Path(name).stem} {at} {first[:60]}", flush=True)

    print(f"running {name}", flush=True)
    try:
        _run_cells(notebook, on_cell, variables)
    except (CellControlSignal, RuntimeError) as error:
        why = f"{error}"
        if isinstance(error, CellExecutionError):  # its text begins with the cell
            why = f"{error.ename}: {error.evalue}"
        notebook.metadata["failed"] = f"{where}\n{why.strip().splitlines()[0]}"
        print(f"\n{where}\n{error}", file=sys.stderr)
    seconds = notebook.metadata["seconds"] = time.monotonic() - begin
    print(f"{name}: ran for {seconds:.1f} s", flush=True)


def _run_cells(notebook: NotebookNode, on_cell: Callable, variables: dict) -> None:
    """Run all cells of a notebook, in place, in a kernel that leaves nothing behind."""
    with tempfile.TemporaryDirectory(dir=scratch.folder()) as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            shutdown_kernel="immediate",  # all its files are in the folder
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
            on_cell_execute=on_cell,
            extra_arguments=[
                f"--IPKernelApp.extra_extensions={asserts.__name__}",
                "--InteractiveShell.colors=NoColor",
            ],
        )
        # A kernel of this interpreter, whatever is installed in the usual places; and
        # named sockets, since a port that is free now may be taken when it starts.
        client.km = AsyncKernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=str(Path(folder, "kernel.json")),
            transport="ipc",
            ip=f"@{Path(folder).name}",  # abstract: a file's path could be too long
        )
        env = {n: v for n, v in os.environ.items() if not _SETTINGS.match(n)}
        # A home may not be writable; and temporary files would outlive a killed kernel.
        places = "IPYTHONDIR", "MPLCONFIGDIR", "XDG_RUNTIME_DIR", "TMPDIR"
        env |= dict.fromkeys(places, folder) | variables
        try:  # the parent of the kernel is this thread
            client.execute(env=env, preexec_fn=end_with_parent)
        finally:
            # Which nbclient leaves there if the kernel does not start.
            atexit.unregister(client._cleanup_kernel)
            scratch.end_all(folder)  # what the kernel has started and left
