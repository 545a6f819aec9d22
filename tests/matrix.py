"""Run chapters and equality tests under other versions, and as on other machines.

For each choice of versions a copy of the project is installed into an environment of
its own; where none is chosen, the copy runs in this one. There both run once on each
machine: what its processes see of the CPU's code path and of threads, on the cores of
this process, which `taskset` sets.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import numpy as np
from torch.backends import cpu

from cdopt_tutorial.publish import project
from cdopt_tutorial.publish.execute import end_with_parent
from cdopt_tutorial.publish.reference import Reference, origin, processor

PATIENCE = 3600  # seconds for a cell, since so long a run has seldom a machine alone
CHAPTERS_RAN = 0, 1, 3  # exit codes of `execute`: all is well, some failed, moved
EQUALITY = "one_process"  # stands in the name of each test that compares with one
VERSIONS = "python", "torch", "cdopt"
MACHINE = "cpu", "threads", "cores"
# By code paths, the oldest first: what MKL and oneDNN call them.
PATHS = {"default": ("COMPATIBLE", "SSE41"), "avx2": ("AVX2", "AVX2"), "avx512": ()}
# Torch itself says which versions of these it works with.
OF_TORCH = "filelock fsspec jinja2 networkx sympy typing_extensions".split()
BUILT = "_build .git .venv .*_cache .hypothesis __pycache__ *.egg-info".split()
INSTALLED = (
    "import json, platform; from importlib.metadata import version as v; found = "
    "{'python': platform.python_version(), 'torch': v('torch'), 'cdopt': v('cdopt')}; "
    "print(json.dumps(found))"
)

Found = dict[str, Any]  # what came of one environment on one machine
progress = partial(print, file=sys.stderr, flush=True)


class StepFailed(Exception):
    """A step ended badly; the message is its last line."""


@dataclass(frozen=True)
class Machine:
    """What processes see of this machine."""

    cpu: str  #: the code path that they take, a name of `PATHS`
    threads: int  #: that share an operator's work; 0: as many as each library takes
    cores: int = len(os.sched_getaffinity(0))  #: on which all run

    def variables(self) -> dict[str, str]:
        """What they find in their environment."""
        found = {}
        if self.threads:
            # MKL would allow torch no more of them than this machine has cores.
            found = {"OMP_NUM_THREADS": f"{self.threads}", "MKL_DYNAMIC": "FALSE"}
            found["MKL_NUM_THREADS"] = f"{self.threads}"
        if self.cpu != paths()[-1]:
            mkl, onednn = PATHS[self.cpu]
            found |= {"MKL_CBWR": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
            # Numpy warns of groups that it was not built with, or this CPU has not.
            groups = np.show_config("dicts")["SIMD Extensions"].get("found", [])
            newer = ("AVX512", "X86_V4") if self.cpu == "avx2" else ""
            off = " ".join(name for name in groups if name.startswith(newer))
            found |= {"ATEN_CPU_CAPABILITY": self.cpu, "NPY_DISABLE_CPU_FEATURES": off}
        return found


def paths() -> list[str]:
    """The code paths that this CPU has; the last one is its own."""
    own, known = cpu.get_cpu_capability().lower(), list(PATHS)
    return known[: known.index(own) + 1] if own in known else [own]


def flags() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(prog="python -m matrix")
    parser.description = "Each may be given several times; all combinations are tried."
    parser.epilog = "exit code 1: an environment failed; 3: all ran, but a figure moved"
    which = "path of a chapter (default: all chapters)"
    parser.add_argument("notebooks", metavar="NOTEBOOK", nargs="*", help=which)
    each = partial(parser.add_argument, action="append", default=[])
    each("--torch", metavar="VERSION", help="(default: the pinned)")
    each("--cdopt", metavar="VERSION", help="(default: the pinned)")
    each("--python", metavar="NAME", help="such as python3.12 (default: this one)")
    each("--cpu", choices=paths(), help="a code path (default: the CPU's own)")
    threads = "of the operators (default: as they choose)"
    each("--threads", metavar="N", type=int, help=threads)
    update = "add what these machines gave to notebooks/reference.toml"
    parser.add_argument("--update-reference", action="store_true", help=update)
    without = "leave out the tests on Ray and torchrun"
    parser.add_argument("--no-engines", action="store_true", help=without)
    return parser


def main() -> int:
    """Try all combinations; print the tables, and to stderr what is under way."""
    args = flags().parse_args()
    reference, tried = Reference(project.this_project()), []
    choices = product(args.cpu or paths()[-1:], args.threads or [0])
    machines = [Machine(*each) for each in choices]
    chosen = args.python or [""], args.torch or [""], args.cdopt or [""]
    for versions in product(*chosen):
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            wanted = dict(zip(VERSIONS, versions, strict=True))
            place = Place(Path(folder), wanted, args, reference)
            for machine in machines:
                tried.append(try_out(place, machine))
                progress(json.dumps(tried[-1]))  # so that nothing is lost on the way
                if args.update_reference:
                    update(reference, tried[-1])
    print(tables(tried))
    if any(each["failures"] for each in tried):
        return 1
    drifted = (not change["holds"] for each in tried for change in each["changes"])
    return 3 if any(drifted) else 0


def update(reference: Reference, found: Found) -> None:
    """Add to the reference what chapters gave that ran through on a machine."""
    here = origin(**{name: found[name] for name in (*MACHINE, "python", "torch")})
    for chapter in found["passed"]:
        reference.update(chapter, found["figures"][chapter], here)


@dataclass
class Place:
    """A folder with a copy of the project, and an environment of these versions."""

    folder: Path
    versions: dict[str, str]  #: as they are chosen, and once installed, as they are
    args: argparse.Namespace  #: what is to be run
    reference: Reference
    python: str = ""  #: of the environment, once it is installed

    def __post_init__(self) -> None:
        self.copy = self.folder / "project"

    def call(
        self, *command: object, file: Path | None = None, codes: tuple[int, ...] = (0,)
    ) -> str:
        """Run a command in the copy, with nothing of this Python's own settings.

        It has failed by its exit code, or if it did not write the file that it should.
        """
        env = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
        env.pop("CI", None)  # where there is no root, tests on hosts may be skipped
        env |= {"PYTHONPATH": str(self.copy), "TMPDIR": str(self.folder)}
        if file:
            file.unlink(missing_ok=True)  # that of the machine before
        done = subprocess.run(
            list(map(str, command)), cwd=self.copy, env=env | self.machine.variables(),
            preexec_fn=end_with_parent, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if done.returncode not in codes or (file and not file.exists()):
            lines = done.stdout.strip().splitlines() or ["it said nothing"]
            raise StepFailed(lines[-1])
        return done.stdout

    def install(self, found: Found) -> None:
        """Copy the project and install it, pinned where no version was chosen."""
        root, ignore = project.this_project().root, shutil.ignore_patterns(*BUILT)
        shutil.copytree(
            root, self.copy, symlinks=True, ignore=ignore, dirs_exist_ok=True
        )
        made: str | Path = sys.executable
        if any(self.versions.values()):
            made = self.folder / "env/bin/python"
            base = self.versions["python"] or sys.executable
            self.call(base, "-m", "venv", self.folder / "env")
            chosen = {n: v for n, v in self.versions.items() if n != "python" and v}
            free, file = "|".join([*chosen, *OF_TORCH]), self.folder / "constraints.txt"
            pins = (self.copy / "constraints.txt").read_text("utf-8")
            file.write_text(re.sub(rf"^({free})==.*\n", "", pins, flags=re.M | re.I))
            pip = [made, "-m", "pip", "--disable-pip-version-check", "install"]
            pip += ["-q", "-c", file, "-e", ".[book,ray,test]"]
            self.call(*pip, *(f"{name}=={each}" for name, each in chosen.items()))
        said = self.call(made, "-c", INSTALLED)
        self.versions |= json.loads(said.splitlines()[-1])
        self.python = str(made)

    def run_chapters(self, found: Found) -> None:
        """Run the chapters; note failures, figures, and those that moved."""
        file = self.folder / "chapters.json"
        # By force, or a result of the machine before would be reused.
        command = ["-m", "cdopt_tutorial", "execute", *self.args.notebooks]
        command += ["--force", "--cell-timeout", PATIENCE, "--json", file]
        self.call(self.python, *command, file=file, codes=CHAPTERS_RAN)
        chapters = json.loads(file.read_text("utf-8"))["chapters"]
        for path, chapter in chapters.items():
            name, passed = Path(path).stem, chapter["error"] is None
            figures = found["figures"][name] = chapter["figures"]
            changes = self.reference.changes(name, figures, complete=passed)
            found["changes"] += [{"figure": n} | asdict(c) for n, c in changes.items()]
            if passed:
                found["passed"].append(name)
            else:
                found["failures"].append(f"{name} failed: {chapter['why']}")
        found["chapters"] = f"{len(found['passed'])} of {len(chapters)}"

    def run_tests(self, found: Found) -> None:
        """Run the tests that compare systems with one process; note those that fail."""
        file = self.folder / "tests.xml"
        # One at a time on a single core, or what waits for others is late.
        command = ["-m", "pytest", "-q", "-n", min(2, self.machine.cores)]
        command += ["-m", "not engines"] if self.args.no_engines else []
        command += ["-k", EQUALITY, "--junitxml", file]
        self.call(self.python, *command, file=file, codes=(0, 1))
        failed, cases = {}, list(ElementTree.parse(file).iter("testcase"))
        for case in cases:
            for part in (*case.iterfind("failure"), *case.iterfind("error")):
                why = (part.get("message") or "no reason").splitlines()[0]
                failed[f"{case.get('classname')}::{case.get('name')}"] = why
        ran = sum(case.find("skipped") is None for case in cases)
        found["tests"] = f"{ran - len(failed)} of {ran}"
        found["failures"] += [f"{name} failed: {why}" for name, why in failed.items()]


def try_out(place: Place, machine: Machine) -> Found:
    """Run the chapters and the tests as on this machine; return what came of it.

    The versions are installed before, unless they are. A step that fails is named under
    "failures", and the steps after it are left out.
    """
    steps = {} if place.python else {"installing": place.install}
    steps |= {"running the chapters": place.run_chapters}
    steps |= {"running the equality tests": place.run_tests}
    found: Found = asdict(machine) | {"figures": {}}
    found |= {name: [] for name in ("passed", "changes", "failures")}
    place.machine, begin = machine, time.monotonic()
    try:
        for name, step in steps.items():
            progress(f"{place.versions}, {machine}: {name}")
            step(found)
    except (StepFailed, OSError) as error:
        found["failures"].append(f"{name} failed: {error}")
    return found | place.versions | {"minutes": (time.monotonic() - begin) / 60}


def tables(tried: list[Found]) -> str:
    """What environments were tried, and what moved there, as Markdown."""
    where = f"{processor()} with {os.cpu_count()} cores"
    text = f"Run on {datetime.now(UTC).date()}, on {where}:\n\n"
    columns = [*VERSIONS, *MACHINE, "chapters", "tests"]
    rows = [
        [*(str(each.get(c) or "–") for c in columns), f"{each['minutes']:.0f}"]
        for each in tried
    ]
    text += markdown([*columns, "minutes"], rows) + "\n"
    for name, each in zip(names(tried), tried, strict=True):
        for failure in each["failures"]:
            text += "- {}: `{}`\n".format(name, failure.replace("`", "'"))
    return text + "\n" + moved(tried)


def moved(tried: list[Found]) -> str:
    """A row for each figure that moved anywhere, a column for each environment."""
    figures: dict[str, list[str]] = {}
    for number, each in enumerate(tried):
        for change in each["changes"]:
            begin = [change["figure"], change["was"] or "–", change["allowed"]]
            row = figures.setdefault(change["figure"], begin + ["same"] * len(tried))
            now = change["now"] or "–"
            row[3 + number] = now if change["holds"] else f"**{now}**"
    if not figures:
        return "No figure moved.\n" if any("chapters" in each for each in tried) else ""
    return markdown(["figure", "stored", "allowed", *names(tried)], figures.values())


def names(tried: list[Found]) -> list[str]:
    """What tells each environment from the others; torch, if there is no other."""
    rows = [{k: each[k] or "–" for k in (*VERSIONS, *MACHINE)} for each in tried]
    differ = [k for k in rows[0] if len({row[k] for row in rows}) > 1] or ["torch"]
    return [", ".join(f"{k} {row[k]}" for k in differ) for row in rows]


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
