"""Run chapters once, and keep each result for the pages and for the tests.

A result is a file in `_build/results`, whose name is a hash of all that decides it.
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
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError
from nbformat import NotebookNode
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from cdopt_tutorial import scratch, whole_file
from cdopt_tutorial.publish import asserts
from cdopt_tutorial.publish.chapter import (
    Figures,
    claimed,
    code_cells,
    read_chapter,
    shortened,
)
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.used import used_files

Chapters = Iterable[tuple[Path, NotebookNode]]  # as `read_chapter` reads them
CELL_TIMEOUT = 600  # seconds after which one cell counts as hung
# Libraries whose versions decide a result.
_OWN = re.compile("I?PYTHON|MPL|MATPLOTLIB")  # a reader's variables, for no kernel
_LIBRARIES = "torch cdopt geoopt gymnasium ipython numpy scikit-learn ray".split()


@dataclass(frozen=True)
class Execution:
    """How a chapter ended."""

    path: Path
    notebook: NotebookNode  #: with its outputs, as far as it ran
    seconds: float  #: that the run took, now or earlier
    cached: bool  #: whether an earlier result was reused
    error: str | None = None  #: where and why it failed, and what is kept; or None
    why: str | None = None  #: the reason in one line

    @property
    def figures(self) -> Figures:
        """The figures that it glued, as far as it ran."""
        return claimed(self.notebook)


def fingerprint(root: Path, files: Iterable[Path], facts: object) -> str:
    """Return a hash of files under `root`, by name and content, and of facts."""
    contents = [(f"{f.relative_to(root)}", f.read_bytes()) for f in files]
    return hashlib.sha256(repr((facts, contents)).encode()).hexdigest()[:16]


def digest(project: Project, notebook: NotebookNode, device: str) -> str:
    """Return a hash of all that decides a chapter's result.

    That is its code, the package's files that it uses, directly or not, and versions.
    """
    code = [(c.source, c.metadata.get("tags")) for c in code_cells(notebook)]
    files = [*used_files(project.package, notebook), project.root / "constraints.txt"]
    versions = [platform.python_version()]
    for library in _LIBRARIES:  # without Ray chapter 7 differs
        versions += [each.version for each in distributions(name=library)] or [None]
    return fingerprint(project.root, files, (code, versions, device))


def make_place(project: Project) -> None:
    """Make the folder of results; an OSError if it can't be written."""
    project.results.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=project.results).close()


def find_result(
    project: Project, notebook: NotebookNode, device: str, *, short: bool = False
) -> NotebookNode | None:
    """Return a chapter's valid run, or None if there is none that finished.

    With `short`, fall back on a run of its short profile.
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
    """Run those of the chapters that have no valid result, one after another.

    A failure does not stop the others; a result that can't be written is an OSError.
    With `force` all are run. With `short` the runs are of the short profiles, two at a
    time, also where there is a whole result, which is then what is returned.
    """
    make_place(project)
    variables = {"CDOPT_TUTORIAL_DEVICE": device}
    if short:  # a core for each
        variables["OMP_NUM_THREADS"] = "1"
    run_cells = partial(_run_cells, variables=variables, timeout=cell_timeout)

    def reused(path: Path, chapter: NotebookNode) -> Execution | None:
        if result := find_result(project, chapter, device):
            return Execution(path, result, result.metadata["seconds"], cached=True)
        return None

    def finish(path: Path, whole: NotebookNode) -> Execution:
        chapter = shortened(whole) if short else whole
        done = None if force else reused(path, chapter)
        if done is None:
            file = _file(project, chapter, device)  # before the run, for its sources
            done = _run(project, path, chapter, run_cells)
            if done.error is None:
                chapter.metadata["seconds"] = done.seconds
                whole_file.write(file, gzip.compress(nbformat.writes(chapter).encode()))
        if short and done.error is None:
            done = reused(path, whole) or done
        return done

    # In threads, or nbclient would handle the process's signals.
    with ThreadPoolExecutor(2 if short else 1) as threads:
        return list(threads.map(lambda each: finish(*each), chapters))


def _run(
    project: Project, path: Path, notebook: NotebookNode, run_cells: Callable
) -> Execution:
    """Run one chapter; if it fails, keep it as far as it ran."""
    name = project.relative(path)
    print(f"running {name}", flush=True)
    failed = project.build / "failed" / path.name
    failed.unlink(missing_ok=True)
    progress, error, why = _Progress(path.stem, notebook), None, None
    try:
        run_cells(notebook, progress)
    except (CellControlSignal, RuntimeError) as raised:
        where, why = f"{name} failed in {progress.where}", _plain(raised)
        kept = f"kept as far as it ran: {project.relative(failed)}"
        error = f"{where}\n{why}\n{kept}"
        if isinstance(raised, CellExecutionError):  # its text begins with the cell
            why = _plain(f"{raised.ename}: {raised.evalue}")
        why = why.partition("\n")[0]
        notebook.metadata["failed"] = f"{where}\n{why}\n{kept}"
        failed.parent.mkdir(parents=True, exist_ok=True)
        whole_file.write(failed, nbformat.writes(notebook).encode())
    return Execution(path, notebook, progress.seconds(), False, error, why)


def _plain(text: object) -> str:
    """Return a text without a terminal's colours, and stripped."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(text)).strip()


def read_failed(project: Project, path: Path) -> NotebookNode:
    """Return a failed chapter as far as it ran; `failed` in its metadata says why.

    If none is kept, return it without outputs, and without that entry.
    """
    kept = project.build / "failed" / path.name
    return nbformat.read(kept, 4) if kept.exists() else read_chapter(path)


def _run_cells(
    notebook: NotebookNode, progress: "_Progress", variables: dict, timeout: int
) -> None:
    """Run all cells of a notebook, in place, in a kernel that leaves nothing behind."""
    with tempfile.TemporaryDirectory(dir=scratch.folder()) as folder:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            record_timing=False,
            shutdown_kernel="immediate",  # all its files are in the folder
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
            on_cell_execute=progress.begin,
            extra_arguments=[f"--IPKernelApp.extra_extensions={asserts.__name__}"],
        )
        # A kernel of this interpreter, whatever is installed in the usual places; and
        # named sockets, since a port that is free now may be taken when it starts.
        client.km = AsyncKernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=str(Path(folder, "kernel.json")),
            transport="ipc",
            ip=f"@{Path(folder).name}",  # abstract: a file's path could be too long
        )
        # A result must not depend on a reader's configuration of Python (such as
        # PYTHONOPTIMIZE, which skips asserts), IPython and matplotlib, or on a home
        # that can't be written.
        given = os.environ.items()
        env = {k: v for k, v in given if k == "PYTHONPATH" or not _OWN.match(k)}
        own = dict.fromkeys(("IPYTHONDIR", "MPLCONFIGDIR", "XDG_RUNTIME_DIR"), folder)
        own["TMPDIR"] = folder  # whose files would outlive a killed kernel
        try:
            client.execute(
                env=env | own | variables,
                transport_encryption="auto",
                preexec_fn=end_with_parent,  # the parent being this thread
            )
        finally:
            # Which nbclient leaves there if the kernel does not start.
            atexit.unregister(client._cleanup_kernel)


def end_with_parent() -> None:
    """Have this process, just forked, killed when its parent ends."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)


class _Progress:
    """Prints a line as each code cell starts: the time, its number, its first line."""

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
