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
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import nbformat
import psutil
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

CELL_TIMEOUT = 3600  # seconds after which one cell counts as hung
# Settings of a reader's Python (such as PYTHONOPTIMIZE, which skips asserts), IPython
# and matplotlib, on which no result may depend.
_SETTINGS = ("PYTHON", "IPYTHON", "MPL", "MATPLOTLIB")
# Libraries whose versions decide a result; without Ray chapter 7 differs.
_LIBRARIES = "torch cdopt geoopt gymnasium ipython numpy scikit-learn ray".split()
# Folders of systems, which the others may not import.
_SYSTEMS = "dissolving hybrid parameter_server reinforce rollouts sharding".split()
_KINDS = ".py", ".json", ".mplstyle", ".svg"
# What a system imports, and the systems of commands that have other names.
_IMPLIED = {"rollouts": "reinforce", "rnn": "parameter_server", "shard": "sharding"}
FAILED = ".failed.ipynb"  # beside a good run, if there is one


def digest(project: Project, notebook: NotebookNode, device: str) -> str:
    """Return a hash of all that decides a chapter's result.

    That is its code, the package's files that it may import, and versions.
    """
    code = [(c.source, c.metadata.get("tags")) for c in code_cells(notebook)]
    versions = [[d.version for d in distributions(name=name)] for name in _LIBRARIES]
    files = [*used_files(project.package, notebook), project.root / "constraints.txt"]
    contents = [(f"{f.relative_to(project.root)}", f.read_bytes()) for f in files]
    facts = code, platform.python_version(), versions, device, contents
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def used_files(package: Path, notebook: NotebookNode) -> list[Path]:
    """Return the package's files without the folders that a chapter does not name.

    A chapter that runs a command uses all commands; none uses what publishes it.
    """
    code = "\n".join(cell.source for cell in code_cells(notebook))
    words = {*re.findall(r"\w+", re.sub(r"-m\W+cdopt_tutorial", "commands", code))}
    words |= {_IMPLIED[word] for word in words & _IMPLIED.keys()}
    unused = {*_SYSTEMS, "commands", "publish", ".ipynb_checkpoints"} - words
    # Editors leave hidden files beside the others.
    files = [file for file in package.rglob("[!.]*.*") if file.suffix in _KINDS]
    return sorted(f for f in files if not unused & {*f.relative_to(package).parts})


def find_result(
    project: Project, notebook: NotebookNode, device: str, *, short: bool = False
) -> NotebookNode | None:
    """Return a chapter's valid run, or None if there is none.

    With `short`, fall back on a run of its short profile. If only a run that failed is
    there, it is returned; `failed` in its metadata says why.
    """
    versions = [notebook, *([shortened(notebook)] if short else [])]
    files = [_file(project, version, device) for version in versions]
    files += [file.with_suffix(FAILED) for file in files]
    return next((read(f) for f in files if f.exists()), None)


def _file(project: Project, notebook: NotebookNode, device: str) -> Path:
    return project.results / f"{digest(project, notebook, device)}.ipynb"


def execute(
    paths: Sequence[Path],
    *,
    project: Project,
    device: str = "cpu",
    force: bool = False,
    short: bool = False,
) -> list[NotebookNode]:
    """Run those of the chapters that have no valid result; with `force`, all.

    With `short`, what has no result runs in its short profile, two chapters at once, on
    a core each. Return the results, whose metadata have the `seconds` that the run took
    and, if it `failed`, where and why. A failure does not stop the others; a result
    that can't be written is an OSError.
    """
    chapters = [read_chapter(path) for path in paths]
    project.results.mkdir(parents=True, exist_ok=True)
    scratch.folder()  # before several threads ask for it
    variables = {"CDOPT_TUTORIAL_DEVICE": device}
    if short:
        variables["OMP_NUM_THREADS"] = "1"

    def finish(path: Path, whole: NotebookNode) -> NotebookNode:
        name = f"{project.relative(path)}"
        ran = None if force else find_result(project, whole, device, short=short)
        if ran is not None and "failed" not in ran.metadata:
            seconds = ran.metadata["seconds"]
            print(f"{name}: reused the result of a run of {seconds:.1f} s")
            return ran
        chapter = shortened(whole) if short else whole
        file = _file(project, chapter, device)  # before the run, for its sources
        error = _run(name, chapter, variables)
        file = file.with_suffix(FAILED) if error else file
        whole_file.write(file, nbformat.writes(chapter).encode())
        if error:
            kept = f"kept as far as it ran: {project.relative(file)}"
            print(f"\n{error}\n{kept}", file=sys.stderr)
        return chapter

    # In threads, or nbclient would handle the process's signals.
    with ThreadPoolExecutor(2 if short else 1) as threads:
        return list(threads.map(finish, paths, chapters))


def _run(name: str, notebook: NotebookNode, variables: dict[str, str]) -> str:
    """Run one chapter, in place; return its error, or an empty text.

    A line is printed as each cell of code begins: the time, its number, its first line.
    """
    begin, error = time.monotonic(), ""
    cells = [cell for cell in code_cells(notebook) if cell.source.strip()]
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
    except (CellControlSignal, RuntimeError) as raised:
        reason = text = f"{raised}".strip()
        if isinstance(raised, CellExecutionError):  # its text begins with the cell
            reason = f"{raised.ename}: {raised.evalue}".strip()
        error = f"{where}\n{text}"
        notebook.metadata["failed"] = f"{where}\n{reason.splitlines()[0]}"
    seconds = notebook.metadata["seconds"] = time.monotonic() - begin
    print(f"{name}: ran for {seconds:.1f} s", flush=True)
    return error


def _run_cells(notebook: NotebookNode, on_cell: Callable, variables: dict) -> None:
    """Run all cells of a notebook, in place, in a kernel that leaves nothing behind."""
    with tempfile.TemporaryDirectory(dir=scratch.folder()) as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            record_timing=False,
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
        env = {n: v for n, v in os.environ.items() if not n.startswith(_SETTINGS)}
        env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        # A home may not be writable; and temporary files would outlive a killed kernel.
        places = "IPYTHONDIR", "MPLCONFIGDIR", "XDG_RUNTIME_DIR", "TMPDIR"
        env |= dict.fromkeys(places, folder) | variables
        try:  # the parent of the kernel is this thread
            client.execute(env=env, preexec_fn=end_with_parent)
        finally:
            # Which nbclient leaves there if the kernel does not start.
            atexit.unregister(client._cleanup_kernel)
            _kill_all(folder)


def _kill_all(folder: str) -> None:
    """Kill what a kernel has started and left, also in sessions of its own."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get("TMPDIR") == folder:
                process.kill()


def end_with_parent() -> None:
    """Have this process, just forked, killed when its parent ends."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # made in C: torch has no type of it
