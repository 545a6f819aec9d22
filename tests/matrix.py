"""Run chapters and equality tests with this Python's libraries, as on some machine.

They run in a copy of the project. What they see of a machine is the CPU's code path
and the threads, on the cores of this process, which `taskset` sets.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.backends import cpu

from cdopt_tutorial.publish import project
from cdopt_tutorial.publish.execute import end_with_parent

CORES = len(os.sched_getaffinity(0))
EQUALITY = "one_process"  # stands in the name of each test that compares with one
REFERENCE = "notebooks/reference.toml"
# By code paths, the oldest first: what MKL and oneDNN call them.
PATHS = {"default": ("COMPATIBLE", "SSE41"), "avx2": ("AVX2", "AVX2"), "avx512": ()}
BUILT = "_build .git .venv .*_cache .hypothesis __pycache__ *.egg-info".split()


def variables(path: str, threads: int) -> dict[str, str]:
    """What processes see of a machine with this code path, and so many threads."""
    env = {}
    if threads:
        env = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), f"{threads}")
        # Or it would allow torch no more of them than this machine has cores.
        env["MKL_DYNAMIC"] = "FALSE"
    if path != paths()[-1]:
        mkl, onednn = PATHS[path]
        env |= {"MKL_CBWR": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
        # Numpy warns of groups that it was not built with, or this CPU has not.
        groups = np.show_config("dicts")["SIMD Extensions"].get("found", [])
        newer = ("AVX512", "X86_V4") if path == "avx2" else ""
        off = " ".join(name for name in groups if name.startswith(newer))
        env |= {"ATEN_CPU_CAPABILITY": path, "NPY_DISABLE_CPU_FEATURES": off}
    return env


def paths() -> list[str]:
    """The code paths that this CPU has; the last one is its own."""
    own, known = cpu.get_cpu_capability().lower(), list(PATHS)
    return known[: known.index(own) + 1] if own in known else [own]


def flags() -> argparse.Namespace:
    """What was chosen."""
    parser = argparse.ArgumentParser(prog="python -m matrix")
    parser.epilog = "exit code 1: something failed; 3: all ran, but a figure moved"
    which = "path of a chapter (default: all chapters)"
    parser.add_argument("notebooks", metavar="NOTEBOOK", nargs="*", help=which)
    path = "a code path (default: the CPU's own)"
    parser.add_argument("--cpu", choices=paths(), default=paths()[-1], help=path)
    threads = "of the operators (default: as they choose)"
    parser.add_argument("--threads", type=int, default=0, help=threads)
    update = f"add what this machine gave to {REFERENCE}, as `recording` does"
    parser.add_argument("--update-reference", action="store_true", help=update)
    without = "leave out the tests on Ray and torchrun"
    parser.add_argument("--no-engines", action="store_true", help=without)
    return parser.parse_args()


def main() -> int:
    """Run chapters and tests; print what came of them."""
    args, begin = flags(), time.monotonic()
    root, ignore = project.this_project().root, shutil.ignore_patterns(*BUILT)
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy, file = Path(folder) / "project", Path(folder) / "chapters.json"
        shutil.copytree(root, copy, symlinks=True, ignore=ignore)
        call = partial(run, copy, variables(args.cpu, args.threads))
        command = ["-m", "cdopt_tutorial", "execute", *args.notebooks, "--json", file]
        call(*command, codes=(0, 1, 3))
        chapters = json.loads(file.read_text("utf-8"))["chapters"]
        complete = [name for name, chapter in chapters.items() if not chapter["failed"]]
        if args.update_reference and complete:
            call("tests/recording.py", *complete)
            shutil.copy(copy / REFERENCE, root / REFERENCE)
        # One at a time on a single core, or what waits for others is late.
        command = ["-m", "pytest", "-q", "-rfE", "-n", min(2, CORES), "-k", EQUALITY]
        command += ["-m", "not engines"] if args.no_engines else []
        tests = call(*command, codes=(0, 1)).strip().splitlines()
    minutes = (time.monotonic() - begin) / 60
    name = f"Python {platform.python_version()}, torch {torch.__version__}, {args.cpu}"
    name += f", {args.threads or 'any'} threads, {CORES} cores"
    ran = f"{len(complete)} of {len(chapters)} chapters, {tests[-1]}"
    print(f"- {name}: {ran}, {minutes:.0f} minutes")
    return report(chapters, [t for t in tests if re.match("FAILED |ERROR ", t)])


def report(chapters: dict[str, dict], failed: list[str]) -> int:
    """Print the chapters and tests that failed, and what moved; the exit code."""
    moved = []
    for name, chapter in chapters.items():
        failed += [chapter["failed"]] if chapter["failed"] else []
        figures = chapter["moved"] or {}
        moved += [f"{name}: {figure} {how}" for figure, how in figures.items()]
    for line in failed + moved:
        print("  - `{}`".format(line.replace("\n", ": ").replace("`", "'")))
    return 1 if failed else 3 if moved else 0


def run(
    copy: Path, machine: dict[str, str], *command: object, codes: tuple[int, ...] = (0,)
) -> str:
    """What Python says in a copy, as on a machine, and without this one's settings.

    If it ends with another exit code, its last line ends this process.
    """
    env = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
    env.pop("CI", None)  # where there is no root, tests on hosts may be skipped
    env |= {"PYTHONPATH": str(copy), "TMPDIR": str(copy.parent)} | machine
    print(*command, file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=copy, env=env,
        preexec_fn=end_with_parent, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
    )  # fmt: skip
    if done.returncode not in codes:
        sys.exit((done.stdout.strip().splitlines() or ["it said nothing"])[-1])
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
