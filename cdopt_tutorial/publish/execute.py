"""Run chapters once, and keep each result for the pages and for the tests.

A jupyter-cache in `_build/.jupyter_cache/<digest>` finds it by the chapter's code.
"""

import atexit
import hashlib
import os
import platform
import re
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn, JupyterCacheAbstract
from jupyter_cache.cache.db import OrmBase
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError
from nbformat import NotebookNode
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from cdopt_tutorial.publish.chapter import Figures, claimed, read_chapter
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.scratch import scratch

CELL_TIMEOUT = 600  # seconds after which one cell counts as hung
# What decides a result besides a chapter: files of the package, and libraries.
_KINDS = (".py", ".mplstyle", ".svg")
_LIBRARIES = "torch cdopt geoopt gymnasium ipython numpy scikit-learn".split()
_OPTIONAL = "ray"  # chapter 7 is another one without it
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True)
class Execution:
    """What became of one chapter."""

    path: Path
    notebook: NotebookNode  #: with its outputs, as far as it ran
    seconds: float  #: time of the run that made the result, now or earlier
    cached: bool  #: whether an earlier result was reused
    error: str | None = None  #: why it failed, to be read; None if it ran through

    @property
    def figures(self) -> Figures:
        """What it claimed, as far as it ran, by name."""
        return claimed(self.notebook)


def fingerprint(root: Path, files: Iterable[Path], facts: object) -> str:
    """Return a name for files under `root`, their content, and the `repr` of facts."""
    contents = [(f"{f.relative_to(root)}", f.read_bytes()) for f in files]
    return hashlib.sha256(repr((facts, contents)).encode()).hexdigest()[:16]


def digest(project: Project, device: str) -> str:
    """Return the name of all that decides a result besides the chapter itself."""
    files = sorted(f for f in project.package.rglob("*") if f.suffix in _KINDS)
    files.append(project.root / "constraints.txt")
    versions = [platform.python_version(), *map(version, _LIBRARIES), _optional()]
    return fingerprint(project.root, files, (versions, device))


def _optional() -> str | None:
    """The version of the library that may be missing."""
    try:
        return version(_OPTIONAL)
    except PackageNotFoundError:
        return None


def open_cache(project: Project, device: str) -> JupyterCacheAbstract:
    """Open the cache of results that hold now; keep only the one before it as well.

    What is damaged is made anew, and said. A ValueError names what can't be written.
    """
    current = project.results / digest(project, device)
    try:
        _make_writable(current, project)
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or error
        what = f"can't keep results in {project.relative(current)}"
        raise ValueError(f"{what}: {why}") from error
    folders = [each for each in project.results.iterdir() if each.is_dir()]
    for old in sorted(folders, key=lambda f: f.stat().st_mtime)[:-2]:
        shutil.rmtree(old)
    cache = get_cache(current)
    OrmBase.metadata.create_all(cache.db)  # of a run that was killed as it did so
    return cache


def _make_writable(folder: Path, project: Project) -> None:
    """Make a folder for a cache, or see that the one that is there can be used."""
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    tempfile.TemporaryFile(dir=folder).close()
    index = folder / "global.db"
    if index.exists():
        index.open("ab").close()
        if _is_damaged(index):
            name = project.relative(index)
            print(f"{name} was damaged: chapters are run again", flush=True)
            index.unlink()


def _is_damaged(index: Path) -> bool:
    """Whether a file is no database, or not whole; one in use by others is neither."""
    try:
        with closing(sqlite3.connect(index)) as database:
            return database.execute("pragma quick_check").fetchone() != ("ok",)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in _DAMAGED:
            return True
        raise


def find_result(cache: JupyterCacheAbstract, notebook: NotebookNode):
    """Return the cached run of a chapter's code, or None if there is no whole one."""
    try:
        record = cache.match_cache_notebook(notebook)
    except KeyError:
        return None
    stored = _stored(cache, record)
    try:
        whole = _checksum(stored) == stored.with_name("checksum").read_text()
    except (OSError, ValueError):
        whole = False
    if not whole:
        print(f"{stored} was damaged: the chapter is run again", flush=True)
        shutil.rmtree(stored.parent, ignore_errors=True)
        return None
    return cache.get_cache_bundle(record.pk)


def _stored(cache: JupyterCacheAbstract, record) -> Path:
    return cache.path / "executed" / record.hashkey / "base.ipynb"


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _keep(cache: JupyterCacheAbstract, run: Execution, project: Project) -> Execution:
    """Keep a run that went through, and a checksum with it; else that is its error."""
    about = {"execution_seconds": run.seconds}
    bundle = CacheBundleIn(run.notebook, str(run.path), data=about)
    try:
        kept = cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
        stored = _stored(cache, kept)
        stored.with_name("checksum").write_text(_checksum(stored))
    except Exception as error:  # of the disk, SQLite or SQLAlchemy
        name, why = project.relative(run.path), str(error).partition("\n")[0]
        return replace(run, error=f"{name} ran, but its result can't be kept: {why}")
    return run


def execute(
    notebooks: Iterable[Path],
    *,
    project: Project,
    device: str = "cpu",
    force: bool = False,
    parameters: Mapping[Path, Mapping[str, object]] | None = None,
    cell_timeout: int = CELL_TIMEOUT,
) -> list[Execution]:
    """Run the notebooks one after another, each only if it has no valid result.

    One that fails does not stop the others. With `force` all are run; `parameters` has
    what to set in each, and a name that a notebook has not is a ValueError before any.
    """
    values = parameters or {}
    chapters = {path: read_chapter(path, values.get(path)) for path in notebooks}
    cache = open_cache(project, device)
    done = []
    for path, chapter in chapters.items():
        if result := None if force else find_result(cache, chapter):
            seconds = result.record.data["execution_seconds"]
            done.append(Execution(path, result.nb, seconds, cached=True))
            continue
        done.append(_run(path, chapter, project, device, cell_timeout))
        if done[-1].error is None:
            done[-1] = _keep(cache, done[-1], project)
    return done


def _run(
    path: Path, notebook: NotebookNode, project: Project, device: str, cell_timeout: int
) -> Execution:
    """Run one chapter; if it fails, keep what there is of it."""
    name = project.relative(path)
    print(f"running {name} on {device}", flush=True)
    failed = project.build / "failed" / path.name
    failed.unlink(missing_ok=True)
    progress, error, begin = _Progress(notebook), None, time.monotonic()
    try:
        _run_cells(notebook, progress, device, cell_timeout)
    except (CellControlSignal, RuntimeError) as raised:
        what, why = f"{name} failed in {progress.where}", _plain(raised)
        kept = f"kept as far as it ran: {project.relative(failed)}"
        error = f"{what}\n{why}\n{kept}"
        if isinstance(raised, CellExecutionError):  # whose text begins with the cell
            why = _plain(f"{raised.ename}: {raised.evalue}")
        notebook.metadata["failed"] = "\n".join([what, *why.splitlines()[:1], kept])
        failed.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, failed)
    seconds = time.monotonic() - begin
    return Execution(path, notebook, seconds, cached=False, error=error)


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
    notebook: NotebookNode, progress: "_Progress", device: str, cell_timeout: int
) -> None:
    """Run all cells of `notebook` in place, in a kernel that leaves nothing behind."""
    with scratch() as folder:
        # Times would go into the cells' metadata, which the cache hashes.
        options = {"record_timing": False, "coalesce_streams": True}
        options["resources"] = {"metadata": {"path": folder}}
        hooks = {"on_cell_execute": progress.begin, "on_cell_executed": progress.end}
        client = NotebookClient(notebook, timeout=cell_timeout, **options, **hooks)
        connection = str(Path(folder, "kernel.json"))
        client.km = manager = _KernelManager(connection_file=connection)
        # A reader's own IPython configuration must not change a result.
        env = {**os.environ, "IPYTHONDIR": folder, "XDG_RUNTIME_DIR": folder}
        env["CDOPT_TUTORIAL_DEVICE"] = device
        env["TMPDIR"] = folder  # also of what the kernel leaves if it is killed
        # In a thread, or nbclient would take the process's signals for itself.
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(
                client.execute,
                env=env,
                transport_encryption="auto",
                preexec_fn=end_with_parent,
            )
            try:
                running.result()
            except BaseException:
                atexit.unregister(client._cleanup_kernel)  # it would look for one
                kernel = getattr(manager.provisioner, "process", None)
                if kernel is not None:
                    kernel.kill()
                raise


def end_with_parent() -> None:
    """In a process that was just forked: it ends with the one that has forked it."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)


class _Progress:
    """Prints a line per code cell: its number, its first line, its seconds."""

    def __init__(self, notebook: NotebookNode) -> None:
        cells = enumerate(notebook.cells)
        self._code = [i for i, c in cells if c.cell_type == "code" and c.source.strip()]
        self.where = "no cell: the kernel did not start"

    def begin(self, cell: NotebookNode, cell_index: int) -> None:
        first = cell.source.strip().splitlines()[0]
        number, total = self._code.index(cell_index) + 1, len(self._code)
        self.where = f"code cell {number} of {total}, which begins\n    {first}"
        label = f"  [{number:{len(str(total))}}/{total}] {first[:60]:60}"
        print(label, end=" ", flush=True)
        self._begin = time.monotonic()

    def end(self, cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
        failed = execute_reply["content"]["status"] == "error"
        seconds = f"{time.monotonic() - self._begin:6.1f} s"
        print(f"{seconds}  FAILED" if failed else seconds, flush=True)
