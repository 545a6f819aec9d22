"""Run chapters and equality tests under other versions, and as on other machines.

For each choice of versions a copy of the project is installed into an environment of
its own; where none is asked for, the copy runs in this one. There both run once on each
machine: what its processes are told of the CPU's code path, of threads and of cores.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from torch.backends import cpu

from cdopt_tutorial.checks import at_least, check
from cdopt_tutorial.publish.execute import end_with_parent
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference

PATIENCE = 3600  # seconds for a cell, since so long a run has seldom a machine alone
CHAPTERS_RAN = (0, 1, 3)  # exit codes of `execute`: all is well, some failed, moved
EQUALITY = "one_process"  # stands in the name of each test that compares with one
_NOTED = ("torch", "cdopt", "numpy", "ray")  # libraries whose versions are noted
_MACHINE = ("cpu", "threads", "cores")  # what its table has of a machine
_NAMED = ("torch", "python", "cdopt", *_MACHINE)  # what an environment is known by
# By code paths, the oldest first: what MKL and oneDNN call them.
_PATHS = {"default": ("COMPATIBLE", "SSE41"), "avx2": ("AVX2", "AVX2"), "avx512": ()}
# Torch itself says which versions of these it works with.
_OF_TORCH = "filelock fsspec jinja2 networkx sympy typing_extensions".split()
_BUILT = "_build .git .venv .*_cache .hypothesis __pycache__ *.egg-info".split()
_VERSION = r"\d+(\.\d+)*((a|b|rc)\d+)?(\.(post|dev)\d+)?(\+[\w.]+)?"
_PYTHON = "import sys, ensurepip, venv; print('%d.%d.%d' % sys.version_info[:3])"
_INSTALLED = (
    "import json, sys; from importlib.metadata import distributions as all; "
    "print(json.dumps({d.name: d.version for d in all() if d.name in sys.argv[1:]}))"
)

Found = dict[str, Any]


class _StepFailed(Exception):
    """A step ended badly; the message is its last line."""


@dataclass(frozen=True)
class Versions:
    """What one environment is to be made of."""

    interpreter: str | None  #: path of the Python that makes it; None: it is this one
    python: str  #: its version
    torch: str
    cdopt: str

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}, cdopt {self.cdopt}"


@dataclass(frozen=True)
class Machine:
    """What processes see of this machine."""

    cpu: str  #: the code path that they take, a name of `_PATHS`
    threads: int  #: that share an operator's work; 0: as many as each library takes
    cores: int  #: on which they run

    def __str__(self) -> str:
        return f"cpu {self.cpu}, threads {self.threads or '–'}, cores {self.cores}"

    def variables(self) -> dict[str, str]:
        """Return what they find in their environment."""
        found = {}
        if self.threads:
            # MKL would allow torch no more of them than this machine has cores.
            found = {"OMP_NUM_THREADS": f"{self.threads}", "MKL_DYNAMIC": "FALSE"}
            found["MKL_NUM_THREADS"] = f"{self.threads}"
        if self.cpu != _paths()[-1]:
            mkl, onednn = _PATHS[self.cpu]
            found |= {"MKL_CBWR": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
            # Numpy warns of groups that it was not built with, or this CPU has not.
            groups = np.show_config("dicts")["SIMD Extensions"].get("found", [])
            newer = ("AVX512", "X86_V4") if self.cpu == "avx2" else ""
            off = " ".join(name for name in groups if name.startswith(newer))
            found |= {"ATEN_CPU_CAPABILITY": self.cpu, "NPY_DISABLE_CPU_FEATURES": off}
        return found

    def enter(self) -> None:
        """In a process that was just forked: it stays on these cores, as all below."""
        end_with_parent()
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.cores])


def simulate(cpus: list[str], threads: list[int], cores: list[int]) -> list[Machine]:
    """Return every combination; a ValueError names what this machine has not.

    Where none is named, it is as it is.
    """
    paths, most = _paths(), len(os.sched_getaffinity(0))
    choices = product(cpus or paths[-1:], threads or [0], cores or [most])
    found = list(dict.fromkeys(Machine(*each) for each in choices))
    for each in found:
        check(each, "cpu", each.cpu in paths, f"{' or '.join(paths)} on this CPU")
        at_least(each, 0, "threads")
        check(each, "cores", 1 <= each.cores <= most, f"from 1 to {most} here")
    return found


def _paths() -> list[str]:
    """The code paths that this CPU has; the last one is its own."""
    own, known = cpu.get_cpu_capability().lower(), list(_PATHS)
    return known[: known.index(own) + 1] if own in known else [own]


def combine(
    project: Project, pythons: list[str], torches: list[str], cdopts: list[str]
) -> list[Versions]:
    """Return every combination; where none is named, this Python or what is pinned.

    If nothing is named, that is the environment that runs, as it is. A ValueError names
    a Python that is not here, or what is no version.
    """
    if not (pythons or torches or cdopts):
        own = (version(name) for name in ("torch", "cdopt"))
        return [Versions(None, platform.python_version(), *own)]
    pins = (project.root / "constraints.txt").read_text("utf-8")
    given = {"torch": torches, "cdopt": cdopts}
    for name, versions in given.items():
        given[name] = versions or re.findall(rf"^{name}==(.+)$", pins, re.M)
        for each in given[name]:
            if not re.fullmatch(_VERSION, each):
                needed = "must be a version, such as 2.13.0"
                raise ValueError(f"{name} is {each!r}, but {needed}")
    found = [_find_python(name) for name in pythons or [sys.executable]]
    choices = product(found, *given.values())
    return list(dict.fromkeys(Versions(*python, *rest) for python, *rest in choices))


def _find_python(name: str) -> tuple[str, str]:
    """Return the path of an interpreter that can make environments, and its version."""
    path, version = shutil.which(name), ""
    if path:
        command = [path, "-c", _PYTHON]
        done = subprocess.run(command, capture_output=True, text=True)
        version = done.stdout.strip()
    number = re.fullmatch(r"(\d+)\.(\d+)\.\d+", version)
    if not number or tuple(map(int, number.groups())) < (3, 11):
        needed = "must be a Python here, 3.11 or newer, with its module venv"
        raise ValueError(f"python is {name!r}, but {needed}")
    return os.path.abspath(path), version


class Place:
    """A folder with a copy of the project, and an environment of these versions."""

    machine: Machine  #: what processes see of this one, at the time
    passed: list[str]  #: the chapters that ran through on it

    def __init__(
        self,
        folder: str,
        project: Project,
        versions: Versions,
        chapters: list[Path],
        engines: bool = True,
    ) -> None:
        self.folder, self.project, self.versions = Path(folder), project, versions
        self.chapters = chapters  #: to run, relative to the project
        self.engines = engines  #: whether the tests on them are run, too
        self.copy, self.environment = self.folder / "project", self.folder / "env"
        made = self.environment / "bin" / "python"
        self.python = made if versions.interpreter else sys.executable
        self.installed: dict[str, str] = {}  #: libraries and their versions

    def call(
        self, *command: object, file: Path | None = None, codes: tuple[int, ...] = (0,)
    ) -> str:
        """Run a command in the copy, with nothing of this Python's own settings.

        It has failed by its exit code, or if it did not write the file that it should.
        """
        env = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
        env.pop("CI", None)  # where there is no root, tests on hosts may be skipped
        env |= self.machine.variables() | {"TMPDIR": str(self.folder)}
        if not self.versions.interpreter:
            env["PYTHONPATH"] = str(self.copy)  # goes before what is installed
        if file:
            file.unlink(missing_ok=True)  # that of the machine before
        done = subprocess.run(
            list(map(str, command)), cwd=self.copy, env=env,
            preexec_fn=self.machine.enter, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if done.returncode not in codes or (file and not file.exists()):
            lines = done.stdout.strip().splitlines() or ["it said nothing"]
            raise _StepFailed(lines[-1])
        return done.stdout

    def install(self, found: Found) -> None:
        """Copy the project and install it, pinned where nothing was asked for."""
        versions, ignore = self.versions, shutil.ignore_patterns(*_BUILT)
        shutil.rmtree(self.copy, ignore_errors=True)  # of a machine that failed here
        shutil.copytree(self.project.root, self.copy, symlinks=True, ignore=ignore)
        if versions.interpreter:
            pins = (self.copy / "constraints.txt").read_text("utf-8")
            free = "|".join(["torch", "cdopt", *_OF_TORCH])
            file = self.folder / "constraints.txt"
            file.write_text(re.sub(rf"^({free})==.*\n", "", pins, flags=re.M | re.I))
            self.call(versions.interpreter, "-m", "venv", self.environment)
            pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install"]
            asked = [f"torch=={versions.torch}", f"cdopt=={versions.cdopt}"]
            self.call(*pip, "-q", "-c", file, "-e", ".[book,ray,test]", *asked)
        said = self.call(self.python, "-c", _INSTALLED, *_NOTED)
        self.installed = json.loads(said.splitlines()[-1])
        found |= self.installed

    def run_chapters(self, found: Found) -> None:
        """Run the chapters; note failures, figures, and those that moved."""
        file, reference = self.folder / "chapters.json", Reference(self.project)
        # By force, or a result of the machine before would be reused.
        command: list = ["-m", "cdopt_tutorial.cli", "execute", *self.chapters]
        command += ["--force", "--cell-timeout", PATIENCE, "--json", file]
        self.call(self.python, *command, file=file, codes=CHAPTERS_RAN)
        chapters = json.loads(file.read_text("utf-8"))["chapters"]
        for path, chapter in chapters.items():
            name, passed = Path(path).stem, chapter["error"] is None
            figures = found["figures"][name] = chapter["figures"]
            moved = reference.changes(name, figures, complete=passed)
            found["changes"] += [{"figure": n} | asdict(c) for n, c in moved.items()]
            if passed:
                self.passed.append(name)
            else:
                found["failures"].append(f"{name} failed: {chapter['why']}")
        found["chapters"] = f"{len(self.passed)} of {len(chapters)}"

    def run_tests(self, found: Found) -> None:
        """Run the tests that hold systems against one process; note those that fail."""
        file = self.folder / "tests.xml"
        # One at a time on a single core, or what waits for others is late.
        command = ["-m", "pytest", "-q", "-n", min(2, self.machine.cores)]
        command += ["-k", EQUALITY, "--junitxml", file]
        command += [] if self.engines else ["-m", "not engines"]
        self.call(self.python, *command, file=file, codes=(0, 1))
        cases = list(ElementTree.parse(file).iter("testcase"))
        failed = {}
        for case in cases:
            for part in (*case.iterfind("failure"), *case.iterfind("error")):
                why = (part.get("message") or "no reason").splitlines()[0]
                failed[f"{case.get('classname')}::{case.get('name')}"] = why
        ran = sum(case.find("skipped") is None for case in cases)
        found["tests"] = f"{ran - len(failed)} of {ran}"
        found["failures"] += [f"{name} failed: {why}" for name, why in failed.items()]


def try_out(place: Place, machine: Machine, progress: Callable) -> Found:
    """Run the chapters and the tests as on this machine; return what came out.

    The versions are installed before, unless they are. It calls `progress` with a line
    before each step. A step that fails is named under "failures", and the steps after
    it are left out.
    """
    found: Found = asdict(place.versions) | place.installed | asdict(machine)
    found |= {"chapters": "", "tests": "", "figures": {}, "changes": [], "failures": []}
    del found["interpreter"]
    steps = {} if place.installed else {"installing": place.install}
    steps |= {"running the chapters": place.run_chapters}
    steps |= {"running the equality tests": place.run_tests}
    place.machine, place.passed, begin = machine, [], time.monotonic()
    try:
        for name, step in steps.items():
            progress(f"{place.versions}, {machine}: {name}")
            step(found)
    except _StepFailed as error:
        found["failures"].append(f"{name} failed: {error}")
    found["seconds"] = round(time.monotonic() - begin)
    for failure in found["failures"]:
        progress(f"{place.versions}, {machine}: {failure}")
    return found


def runs(kept: Mapping[str, Any]) -> list[Found]:
    """Return the runs in a file of the command; an older one is a single run."""
    return kept["runs"] if "runs" in kept else [kept]


def table(kept: Mapping[str, Any]) -> str:
    """Return what environments each run tried, and what moved there, as Markdown."""
    return "\n".join(map(_table, runs(kept)))


def _table(run: Found) -> str:
    tried, machine = run["environments"], run["machine"]
    where = f"{machine['processor']} with {machine['cores']} cores"
    text = f"Run on {run['date']}, on {where}:\n\n"
    simulated = [name for name in _MACHINE if any(name in each for each in tried)]
    # Few enough for a page to show all of them.
    columns = ["python", "torch", "cdopt", *simulated, "chapters", "tests"]
    rows = [[str(each.get(c) or "–") for c in columns] for each in tried]
    for row, each in zip(rows, tried, strict=True):
        row.append(f"{each['seconds'] / 60:.0f}")
    text += _markdown([*columns, "minutes"], rows) + "\n"
    for name, each in zip(_names(tried), tried, strict=True):
        for failure in each["failures"]:
            text += "- {}: `{}`\n".format(name, failure.replace("`", "'"))
    return text + "\n" + _moved(tried)


def _moved(tried: list[Found]) -> str:
    """A row for each figure that moved anywhere, a column for each environment."""
    figures: dict[str, list[str]] = {}
    for number, each in enumerate(tried):
        for change in each["changes"]:
            begin = [change["figure"], change["was"] or "–", change["allowed"]]
            row = figures.setdefault(change["figure"], begin + ["same"] * len(tried))
            now = change["now"] or "–"
            row[3 + number] = now if change["holds"] else f"**{now}**"
    if not figures:
        return "No figure moved.\n" if any(each["chapters"] for each in tried) else ""
    return _markdown(["figure", "stored", "allowed", *_names(tried)], figures.values())


def _names(tried: list[Found]) -> list[str]:
    """What tells each environment from the others; torch, if there is no other."""
    rows = [{k: each.get(k) or "–" for k in _NAMED} for each in tried]
    differ = [k for k in _NAMED if len({row[k] for row in rows}) > 1] or ["torch"]
    return [", ".join(f"{k} {row[k]}" for k in differ) for row in rows]


def _markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
