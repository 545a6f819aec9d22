"""Record what chapters gave on this machine in `notebooks/reference.toml`.

``PYTHONPATH=tests python -m recording``, after `cdopt-tutorial execute`, widens the
ranges by the results of whole runs on the CPU; with ``--anew`` it keeps the rules only.
"""

import argparse
import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import tomlkit
from joblib import cpu_count
from torch.backends import cpu

from cdopt_tutorial import whole_file
from cdopt_tutorial.publish.chapter import Figures, claimed, read_chapter
from cdopt_tutorial.publish.execute import find_result
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.publish.reference import is_here, seen_range, short


def main() -> None:
    """Record the chapters that are named, or else all."""
    parser = argparse.ArgumentParser(prog="python -m recording", description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="chapters, or else all")
    anew = "forget what other runs gave before"
    parser.add_argument("--anew", action="store_true", help=anew)
    args, book = parser.parse_args(), this_project()
    for path in args.notebooks or book.chapters():
        result = find_result(book, read_chapter(path))
        if result is None or "failed" in result.metadata:
            parser.exit(1, f"{path} has no result: run cdopt-tutorial execute\n")
        table, figures = book.root / "notebooks/reference.toml", claimed(result)
        update(table, path.stem, figures, origin(), anew=args.anew)


def update(
    path: Path, chapter: str, figures: Figures, origin: str, *, anew: bool = False
) -> None:
    """Add the figures of a run, on a machine named by `origin`, to their ranges.

    Exact figures and texts are replaced; figures no longer there are removed. With
    `anew` only the rules of the figures are kept.
    """
    table = tomlkit.parse(path.read_text("utf-8") if path.exists() else "")
    part = table.setdefault(chapter, tomlkit.table())
    if anew:
        part.pop("runs", None)
    runs = part.setdefault("runs", tomlkit.array().multiline(True))
    if origin not in runs:
        runs.append(origin)
    rows = part.setdefault("figures", tomlkit.table())
    for name, value in figures.items():
        row = rows.setdefault(name, tomlkit.inline_table())
        values = [float(short(value)) if isinstance(value, float) else value]
        is_text = isinstance(value, str) or isinstance(row.get("seen"), str)
        if "seen" in row and not (anew or row.get("exact") or is_text):
            values += seen_range(row)
        least, most = min(values), max(values)
        row["seen"] = least if least == most else [least, most]
    for name in rows.keys() - figures.keys():
        if is_here(rows[name]):
            del rows[name]
    # Tomlkit adds a key to a row without a space before it.
    text = re.sub(",(?=seen =)", ", ", tomlkit.dumps(table))
    whole_file.write(path, text.encode())


def origin() -> str:
    """Return the date, this machine and its versions, as the reference names them."""
    name = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M)
    machine = [name[1] if name else platform.machine()]
    machine += [cpu.get_cpu_capability().lower()]  # the code path
    if threads := os.environ.get("OMP_NUM_THREADS"):
        machine += [f"{threads} threads"]
    machine += [f"{cpu_count()} cores"]
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{datetime.now(UTC).date()}: {', '.join(machine)}; {versions}"


if __name__ == "__main__":
    main()
