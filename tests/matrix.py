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
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import numpy as np
from torch.backends import cpu

from cdopt_tutorial.publish import project
from cdopt_tutorial.publish.execute import end_with_parent

CORES = len(os.sched_getaffinity(0))
EQUALITY = "one_process"  # stands in the name of each test that compares with one
REFERENCE = "notebooks/reference.toml"
# By code paths, the oldest first: what MKL and oneDNN call them.
PATHS = {"default": ("COMPATIBLE", "SSE41"), "avx2": ("AVX2", "AVX2"), "avx512": ()}
# Torch itself says which versions of these it works with.
OF_TORCH = "filelock fsspec jinja2 networkx sympy typing_extensions".split()
BUILT = "_build .git .venv .*_cache .hypothesis __pycache__ *.egg-info".split()
progress = partial(print, file=sys.stderr, flush=True)


class StepFailed(Exception):
    """A step ended badly; the message is its last line."""


@dataclass(frozen=True)
class Machine:
    """What processes see of this machine."""

    cpu: str  #: the code path that they take, a name of `PATHS`
    threads: int  #: that share an operator's work; 0: as many as each library takes

    def __str__(self) -> str:
        return f"{self.cpu}, {self.threads or 'any'} threads, {CORES} cores"

    def variables(self) -> dict[str, str]:
        """What they find in their environment."""
        env = {}
        if self.threads:
            # MKL would allow torch no more of them than this machine has cores.
            names = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
            env = dict.fromkeys(names, f"{self.threads}") | {"MKL_DYNAMIC": "FALSE"}
        if self.cpu != paths()[-1]:
            mkl, onednn = PATHS[self.cpu]
            env |= {"MKL_CBWR": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
            # Numpy warns of groups that it was not built with, or this CPU has not.
            groups = np.show_config("dicts")["SIMD Extensions"].get("found", [])
            newer = ("AVX512", "X86_V4") if self.cpu == "avx2" else ""
            off = " ".join(name for name in groups if name.startswith(newer))
            env |= {"ATEN_CPU_CAPABILITY": self.cpu, "NPY_DISABLE_CPU_FEATURES": off}
        return env


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
    update = f"add what these machines gave to {REFERENCE}, as `recording` does"
    parser.add_argument("--update-reference", action="store_true", help=update)
    without = "leave out the tests on Ray and torchrun"
    parser.add_argument("--no-engines", action="store_true", help=without)
    return parser


def main() -> int:
    """Try all combinations; print a table, and to stderr what is under way."""
    args, tried = flags().parse_args(), list[Outcome]()
    machines = product(args.cpu or paths()[-1:], args.threads or [0])
    machines = [Machine(*machine) for machine in machines]
    versions = [args.python or [""], args.torch or [""], args.cdopt or [""]]
    for chosen in product(*versions):
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            place = Place(Path(folder), chosen, args)
            tried += [place.try_out(machine) for machine in machines]
    print("| versions and machine | chapters | tests | minutes |")
    print("| --- | --- | --- | --- |")
    for done in tried:
        print(f"| {done.name} | {done.chapters} | {done.tests} | {done.minutes:.0f} |")
    for done in tried:
        for line in [*done.failures, *done.moved]:
            print(f"- {done.name}: `{line.replace('`', chr(39))}`")
    failed = any(done.failures for done in tried)
    return 1 if failed else 3 * any(done.moved for done in tried)


@dataclass
class Outcome:
    """What came of one environment on one machine."""

    name: str  #: the versions, and the machine
    failures: list[str]  #: steps, chapters and tests
    moved: list[str]  #: figures
    chapters: str = "–"  #: how many of them ran through
    tests: str = "–"
    minutes: float = 0


class Place:
    """A folder with a copy of the project, and an environment of these versions."""

    def __init__(self, folder: Path, versions: tuple[str, ...], args) -> None:
        self.folder, self.copy, self.args = folder, folder / "project", args
        self.versions = dict(zip(("python", "torch", "cdopt"), versions, strict=True))
        self.python = ""  # of the environment, once it is installed

    def try_out(self, machine: Machine) -> Outcome:
        """Run chapters and tests as on this machine, up to a step that fails."""
        chosen = [f"{name} {each}" for name, each in self.versions.items() if each]
        done = Outcome(", ".join([*(chosen or ["as pinned"]), str(machine)]), [], [])
        begin, call = time.monotonic(), partial(self.call, machine)
        try:
            for step in (self.install, self.run_chapters, self.run_tests):
                progress(f"{done.name}: {step.__name__}")
                step(call, done)
        except (StepFailed, OSError) as error:
            done.failures.append(f"{step.__name__} failed: {error}")
        done.minutes = (time.monotonic() - begin) / 60
        progress(done)  # so that nothing is lost on the way
        return done

    def call(self, machine: Machine, *command: object, file: Path | None = None) -> str:
        """Run a command in the copy, with nothing of this Python's own settings.

        It has failed if it did not write the file that it should or, if there is none,
        by its exit code.
        """
        env = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
        env.pop("CI", None)  # where there is no root, tests on hosts may be skipped
        env |= {"PYTHONPATH": str(self.copy), "TMPDIR": str(self.folder)}
        if file:
            file.unlink(missing_ok=True)  # that of the machine before
        done = subprocess.run(
            list(map(str, command)), cwd=self.copy, env=env | machine.variables(),
            preexec_fn=end_with_parent, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if not (file.exists() if file else done.returncode == 0):
            lines = done.stdout.strip().splitlines() or ["it said nothing"]
            raise StepFailed(lines[-1])
        return done.stdout

    def install(self, call, done: Outcome) -> None:
        """Copy the project and install it, once, pinned where no version was chosen."""
        if self.python:
            return
        root, ignore = project.this_project().root, shutil.ignore_patterns(*BUILT)
        shutil.copytree(root, self.copy, symlinks=True, ignore=ignore)
        made: str | Path = sys.executable
        if any(self.versions.values()):
            made = self.folder / "env/bin/python"
            base = self.versions["python"] or sys.executable
            call(base, "-m", "venv", self.folder / "env")
            chosen = {n: v for n, v in self.versions.items() if n != "python" and v}
            free, file = "|".join([*chosen, *OF_TORCH]), self.folder / "constraints.txt"
            pins = (self.copy / "constraints.txt").read_text("utf-8")
            file.write_text(re.sub(rf"^({free})==.*\n", "", pins, flags=re.M | re.I))
            pip = [made, "-m", "pip", "--disable-pip-version-check", "install"]
            pip += ["-q", "-c", file, "-e", ".[book,ray,test]"]
            call(*pip, *(f"{name}=={each}" for name, each in chosen.items()))
        self.python = str(made)

    def run_chapters(self, call, done: Outcome) -> None:
        """Run the chapters; note failures, and figures that moved."""
        file = self.folder / "chapters.json"
        # By force, or a result of the machine before would be reused.
        command = ["-m", "cdopt_tutorial", "execute", *self.args.notebooks, "--force"]
        call(self.python, *command, "--json", file, file=file)
        chapters = json.loads(file.read_text("utf-8"))["chapters"]
        complete = [name for name, run in chapters.items() if not run["failed"]]
        if self.args.update_reference and complete:
            call(self.python, "tests/recording.py", *complete)
            shutil.copy(self.copy / REFERENCE, project.this_project().root / REFERENCE)
        for name, chapter in chapters.items():
            if chapter["failed"]:
                done.failures.append(chapter["failed"].replace("\n", ": "))
            moved = chapter["moved"] or {}
            done.moved += [f"{name}: {figure} {how}" for figure, how in moved.items()]
        done.chapters = f"{len(complete)} of {len(chapters)}"

    def run_tests(self, call, done: Outcome) -> None:
        """Run the tests that compare systems with one process; note those that fail."""
        file = self.folder / "tests.xml"
        # One at a time on a single core, or what waits for others is late.
        command = ["-m", "pytest", "-q", "-n", min(2, CORES), "-k", EQUALITY]
        command += ["-m", "not engines"] if self.args.no_engines else []
        call(self.python, *command, "--junitxml", file, file=file)
        failed, cases = {}, list(ElementTree.parse(file).iter("testcase"))
        for case in cases:
            for part in (*case.iterfind("failure"), *case.iterfind("error")):
                why = (part.get("message") or "no reason").splitlines()[0]
                failed[f"{case.get('classname')}::{case.get('name')}"] = why
        ran = sum(case.find("skipped") is None for case in cases)
        done.tests = f"{ran - len(failed)} of {ran}"
        done.failures += [f"{name} failed: {why}" for name, why in failed.items()]


if __name__ == "__main__":
    sys.exit(main())
