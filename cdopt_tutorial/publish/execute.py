"""Run chapters once, and keep each result for the pages and for the tests.

A result is a file in `_build/results`, named by all that decides it.
"""

import atexit
import gzip
import hashlib
import os
import platform
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError
from nbformat import NotebookNode
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from cdopt_tutorial import whole_file
from cdopt_tutorial.publish.chapter import (
    Figures,
    claimed,
    code_cells,
    read_chapter,
    shortened,
)
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.used import used_files
from cdopt_tutorial.scratch import scratch

Chapters = Iterable[tuple[Path, NotebookNode]]  # as `read_chapter` reads them
CELL_TIMEOUT = 600  # seconds after which one cell counts as hung
# The libraries that decide a result.
_LIBRARIES = "torch cdopt geoopt gymnasium ipython numpy scikit-learn ray".split()


@dataclass(frozen=True)
class Execution:
    """What became of a chapter."""

    path: Path
    notebook: NotebookNode  #: with its outputs, as far as it ran
    seconds: float  #: time of the run that made the result, now or earlier
    cached: bool  #: whether an earlier result was reused
    error: str | None = None  #: why it failed, to be read; None if it ran through
    why: str | None = None  #: the same in one line

    @property
    def figures(self) -> Figures:
        """What it claimed, as far as it ran, by name."""
        return claimed(self.notebook)


def fingerprint(root: Path, files: Iterable[Path], facts: object) -> str:
    """Return a name for files under `root`, their content, and the `repr` of facts."""
    contents = [(f"{f.relative_to(root)}", f.read_bytes()) for f in files]
    return hashlib.sha256(repr((facts, contents)).encode()).hexdigest()[:16]


def digest(project: Project, notebook: NotebookNode, device: str) -> str:
    """Return the name of all that decides a chapter's result.

    That is its code, the files of the package that it uses, and what these use.
    """
    code = [(c.source, c.metadata.get("tags")) for c in code_cells(notebook)]
    files = [*used_files(project.package, notebook), project.root / "constraints.txt"]
    versions = [platform.python_version()]
    for library in _LIBRARIES:  # Ray may be missing: chapter 7 is another one then
        versions += [each.version for each in distributions(name=library)] or [None]
    return fingerprint(project.root, files, (code, versions, device))


def make_place(project: Project) -> None:
    """Make the folder of results; an OSError if nothing can be kept there."""
    project.results.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=project.results).close()


def find_result(
    project: Project, notebook: NotebookNode, device: str, *, short: bool = False
) -> NotebookNode | None:
    """Return the run of a chapter that holds now, or None if there is no whole one.

    With `short` one of its short profile will do, if there is no other.
    """
    file = _file(project, notebook, device)
    if file.exists():
        return nbformat.reads(gzip.decompress(file.read_bytes()).decode(), 4)
    return find_result(project, shortened(notebook), device) if short else None


def _file(project: Project, notebook: NotebookNode, device: str) -> Path:
    return project.results / f"{digest(project, notebook, device)}.ipynb.gz"


def execute(
    chapters: Chapters,
    *,
    project: Project,
    device: str = "cpu",
    force: bool = False,
    short: bool = False,
    cell_timeout: int = CELL_TIMEOUT,
) -> list[Execution]:
    """Run chapters one after another, each only if it has no valid result.

    One that fails does not stop the others; a result that can't be kept is an OSError.
    With `force` all are run; with `short` those without a result are run in their short
    profile, two at a time.
    """
    make_place(project)
    variables = {"CDOPT_TUTORIAL_DEVICE": device}
    if short:  # a core for each
        variables["OMP_NUM_THREADS"] = "1"
    run_cells = partial(_run_cells, variables=variables, timeout=cell_timeout)

    def finish(path: Path, chapter: NotebookNode) -> Execution:
        result = None if force else find_result(project, chapter, device, short=short)
        if result:
            return Execution(path, result, result.metadata["seconds"], cached=True)
        chapter = shortened(chapter) if short else chapter
        file = _file(project, chapter, device)  # as the sources are before it runs
        run = _run(project, path, chapter, run_cells)
        if run.error is None:
            chapter.metadata["seconds"] = run.seconds
            whole_file.write(file, gzip.compress(nbformat.writes(chapter).encode()))
        return run

    # In threads, or nbclient would take the process's signals for itself.
    with ThreadPoolExecutor(2 if short else 1) as threads:
        return list(threads.map(lambda each: finish(*each), chapters))


def _run(
    project: Project, path: Path, notebook: NotebookNode, run_cells: Callable
) -> Execution:
    """Run one chapter; if it fails, keep what there is of it."""
    name = project.relative(path)
    print(f"running {name}", flush=True)
    failed = project.build / "failed" / path.name
    failed.unlink(missing_ok=True)
    progress, error, last = _Progress(path.stem, notebook), None, None
    try:
        run_cells(notebook, progress)
    except (CellControlSignal, RuntimeError) as raised:
        what, why = f"{name} failed in {progress.where}", _plain(raised)
        kept = f"kept as far as it ran: {project.relative(failed)}"
        error = f"{what}\n{why}\n{kept}"
        last = (why or what).splitlines()[-1]
        if isinstance(raised, CellExecutionError):  # whose text begins with the cell
            why = _plain(f"{raised.ename}: {raised.evalue}")
        notebook.metadata["failed"] = "\n".join([what, *why.splitlines()[:1], kept])
        failed.parent.mkdir(parents=True, exist_ok=True)
        whole_file.write(failed, nbformat.writes(notebook).encode())
    return Execution(path, notebook, progress.seconds(), False, error, last)


def _plain(said: object) -> str:
    """Return what is said without a terminal's colours, and without space around it."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(said)).strip()


def read_failed(project: Project, path: Path) -> NotebookNode:
    """Return a chapter as far as it ran; its metadata say in `failed` why no farther.

    If nothing is kept it has no outputs, and nothing is said.
    """
    kept = project.build / "failed" / path.name
    return nbformat.read(kept, 4) if kept.exists() else read_chapter(path)


class _KernelManager(AsyncKernelManager):
    """Starts the kernel of this very interpreter, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


def _run_cells(
    notebook: NotebookNode, progress: "_Progress", variables: dict, timeout: int
) -> None:
    """Run all cells of `notebook` in place, in a kernel that leaves nothing behind."""
    with scratch() as folder:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            record_timing=False,
            shutdown_kernel="immediate",  # all that it leaves is in the folder
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
            on_cell_execute=progress.begin,
        )
        # By sockets with a name: a port that is free now may be taken once it starts.
        client.km = _KernelManager(
            connection_file=str(Path(folder, "kernel.json")),
            transport="ipc",
            ip=f"@{Path(folder).name}",  # no file, whose path could be too long
        )
        # A reader's own configuration of IPython and matplotlib must not change a
        # result, nor a home that can't be written.
        own = dict.fromkeys(("IPYTHONDIR", "MPLCONFIGDIR", "XDG_RUNTIME_DIR"), folder)
        own["TMPDIR"] = folder  # also of what the kernel leaves if it is killed
        try:
            client.execute(
                env=os.environ | own | variables,
                transport_encryption="auto",
                preexec_fn=end_with_parent,  # here: with this thread
            )
        finally:
            # It is left there by a kernel that did not start.
            atexit.unregister(client._cleanup_kernel)


def end_with_parent() -> None:
    """In a process that was just forked: it ends with the one that has forked it."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)


class _Progress:
    """Prints a line as a cell of code begins: when, its number, its first line."""

    def __init__(self, name: str, notebook: NotebookNode) -> None:
        cells = enumerate(notebook.cells)
        self._code = [i for i, c in cells if c.cell_type == "code" and c.source.strip()]
        self._name, self._begin = name, time.monotonic()
        self.where = "no cell: the kernel did not start"

    def begin(self, cell: NotebookNode, cell_index: int) -> None:
        first = cell.source.strip().splitlines()[0]
        number, total = self._code.index(cell_index) + 1, len(self._code)
        self.where = f"code cell {number} of {total}, which begins\n    {first}"
        at = f"{self.seconds():6.1f} s  [{number:{len(str(total))}}/{total}]"
        print(f"  {self._name} {at} {first[:60]}", flush=True)

    def seconds(self) -> float:
        return time.monotonic() - self._begin
