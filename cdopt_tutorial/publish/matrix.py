"""Run the chapters and the equality tests under other versions, and make the table.

For each choice of versions a copy of the project is installed into an environment of
its own, which is removed as soon as both have run there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cdopt_tutorial.publish.execute import end_with_parent
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference
from cdopt_tutorial.scratch import scratch

PROFILE = "smoke"
PATIENCE = 3600  # seconds for a cell, since so long a run has seldom a machine alone
EQUALITY = "one_process"  # stands in the name of each test that compares with one
_SHOWN = ("torch", "cdopt", "numpy", "ray")  # libraries whose versions the table has
# Torch itself says which versions of these it works with.
_OF_TORCH = "filelock fsspec jinja2 networkx sympy typing_extensions".split()
_BUILT = "_build .git .venv .*_cache .hypothesis __pycache__ *.egg-info".split()
_VERSION = r"\d+(\.\d+)*((a|b|rc)\d+)?(\.(post|dev)\d+)?(\+[\w.]+)?"
_PYTHON = "import sys, ensurepip, venv; print('%d.%d.%d' % sys.version_info[:3])"
_INSTALLED = (
    "import json, sys; from importlib.metadata import version as v; "
    "print(json.dumps({name: v(name) for name in sys.argv[1:]}))"
)

Found = dict[str, Any]


class _StepFailed(Exception):
    """A step ended badly; the message is its last line."""


@dataclass(frozen=True)
class Versions:
    """What one environment is to be made of."""

    interpreter: str  #: path of the Python that makes it
    python: str  #: its version
    torch: str
    cdopt: str

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}, cdopt {self.cdopt}"


def combine(
    project: Project,
    pythons: Iterable[str],
    torches: Iterable[str],
    cdopts: Iterable[str],
) -> list[Versions]:
    """Return every combination; where none is named, this Python or what is pinned.

    A ValueError names a Python that is not here, or what is no version.
    """
    pins = (project.root / "constraints.txt").read_text("utf-8")
    given = {"torch": torches, "cdopt": cdopts}
    for name, versions in given.items():
        given[name] = versions or re.findall(rf"^{name}==(.+)$", pins, re.M)
        for version in given[name]:
            if not re.fullmatch(_VERSION, version):
                needed = "must be a version, such as 2.13.0"
                raise ValueError(f"{name} is {version!r}, but {needed}")
    found = [_find_python(name) for name in pythons or [sys.executable]]
    choices = product(found, given["torch"], given["cdopt"])
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


def try_out(project: Project, versions: Versions, progress: Callable) -> Found:
    """Install these versions, run the chapters and the tests; return what came out.

    It calls `progress` with a line before each step. A step that fails is named under
    "failures", and the steps after it are left out.
    """
    found: Found = {"python": versions.python, "torch": versions.torch}
    found |= {"cdopt": versions.cdopt, "chapters": "", "tests": "", "changes": []}
    found["failures"], begin = [], time.monotonic()
    steps = {
        "installing": _install,
        "running the chapters": _run_chapters,
        "running the equality tests": _run_tests,
    }
    with scratch() as folder:
        place = _Place(Path(folder), project)
        try:
            for name, step in steps.items():
                progress(f"{versions}: {name}")
                step(place, versions, found)
        except _StepFailed as error:
            found["failures"].append(f"{name} failed: {error}")
    found["seconds"] = round(time.monotonic() - begin)
    for failure in found["failures"]:
        progress(f"{versions}: {failure}")
    return found


class _Place:
    """A folder with a copy of the project, and its environment."""

    def __init__(self, folder: Path, project: Project) -> None:
        self.folder, self.project = folder, project
        self.copy, self.environment = folder / "project", folder / "environment"
        self.python = self.environment / "bin" / "python"

    def call(self, *command: object, file: Path | None = None) -> str:
        """Run a command in the copy, with nothing of this Python's own settings.

        It has failed by its exit code, or if it did not write the file that it should.
        """
        env = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
        env.pop("CI", None)  # where there is no root, tests on hosts may be skipped
        done = subprocess.run(
            list(map(str, command)), cwd=self.copy, env=env | {"TMPDIR": self.folder},
            preexec_fn=end_with_parent, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if done.returncode if file is None else not file.exists():
            lines = done.stdout.strip().splitlines() or ["it said nothing"]
            raise _StepFailed(lines[-1])
        return done.stdout


def _install(place: _Place, versions: Versions, found: Found) -> None:
    """Make the environment, and install the copy as constraints.txt has the rest."""
    ignore = shutil.ignore_patterns(*_BUILT)
    shutil.copytree(place.project.root, place.copy, symlinks=True, ignore=ignore)
    pins = (place.copy / "constraints.txt").read_text("utf-8")
    free = "|".join(["torch", "cdopt", *_OF_TORCH])
    constraints = place.folder / "constraints.txt"
    constraints.write_text(re.sub(rf"^({free})==.*\n", "", pins, flags=re.M | re.I))
    place.call(versions.interpreter, "-m", "venv", place.environment)
    pip = [place.python, "-m", "pip", "--disable-pip-version-check"]
    asked = [f"torch=={versions.torch}", f"cdopt=={versions.cdopt}"]
    place.call(*pip, "install", "-q", "-c", constraints, "-e", ".[ray,test]", *asked)
    *_, last = place.call(place.python, "-c", _INSTALLED, *_SHOWN).splitlines()
    found |= json.loads(last)


def _run_chapters(place: _Place, versions: Versions, found: Found) -> None:
    """Run all chapters in the short profile; note failures, and figures that moved."""
    file = place.folder / "chapters.json"
    command: list = ["-m", "cdopt_tutorial.cli", "execute", "--profile", PROFILE]
    command += ["--cell-timeout", PATIENCE, "--json", file]
    place.call(place.python, *command, file=file)
    chapters = json.loads(file.read_text("utf-8"))["chapters"]
    reference = Reference(place.project)
    for path, chapter in chapters.items():
        name, error, figures = Path(path).stem, chapter["error"], chapter["figures"]
        moved = reference.changes(name, PROFILE, figures, complete=error is None)
        found["changes"] += [{"figure": n} | asdict(c) for n, c in moved.items()]
        if error is not None:
            *_, last = (x for x in error.splitlines() if not x.startswith("kept "))
            found["failures"].append(f"{name} failed: {last}")
    passed = sum(chapter["error"] is None for chapter in chapters.values())
    found["chapters"] = f"{passed} of {len(chapters)}"


def _run_tests(place: _Place, versions: Versions, found: Found) -> None:
    """Run the tests that hold each system against one process; note those that fail."""
    file = place.folder / "tests.xml"
    command = ["-m", "pytest", "-q", "-n", "2", "-k", EQUALITY, "--junitxml", file]
    place.call(place.python, *command, file=file)
    cases = list(ElementTree.parse(file).iter("testcase"))
    failed = [c for c in cases if {"failure", "error"} & {part.tag for part in c}]
    ran = sum(case.find("skipped") is None for case in cases)
    found["tests"] = f"{ran - len(failed)} of {ran}"
    for case in failed:
        name = f"{case.get('classname')}::{case.get('name')}"
        found["failures"].append(f"{name} failed")


def table(found: Mapping[str, Any]) -> str:
    """Return what environments were tried, and each figure that moved, as Markdown."""
    tried, machine = found["environments"], found["machine"]
    where = f"{machine['processor']} with {machine['cores']} cores"
    text = f"Run on {found['date']}, on {where}, in the profile {found['profile']}:\n\n"
    columns = ["python", *_SHOWN, "chapters", "tests"]
    rows = [[each.get(c) or "–" for c in columns] for each in tried]
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
    """What tells each environment from the others, and torch in any case."""
    differ = [k for k in ("python", "cdopt") if len({each[k] for each in tried}) > 1]
    return [" ".join(f"{k} {each[k]}" for k in ["torch", *differ]) for each in tried]


def _markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
