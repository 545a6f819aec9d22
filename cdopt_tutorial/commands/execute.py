"""`cdopt-tutorial execute`: run the chapters, compare their figures."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from tyro.conf import Positional

from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.commands import check_writable, read_flags, write_json
from cdopt_tutorial.publish import chapter, execute, project
from cdopt_tutorial.publish.reference import Reference

DRIFTED = 3  # exit code if all chapters ran and a figure moved


@dataclass(frozen=True)
class Flags:
    """What to run, and how."""

    notebooks: Positional[tuple[Path, ...]] = ()  #: chapters, by default all
    force: bool = False  #: run even if a valid result is cached
    short: bool = False  #: run the chapters' short profiles, two at a time
    device: str = "cpu"  #: auto, cpu, cuda or cuda:N, to compute on
    json: Path | None = None  #: write the results to this file


def run(arguments: list[str]) -> int:
    """Run chapters; return 1 if one failed, else DRIFTED if a figure moved."""
    return run_chapters(read_flags("execute", Flags, arguments))


def run_chapters(flags: Flags) -> int:
    """The same, with flags that were read."""
    check_writable(flags.json)
    book = project.this_project()
    paths, reference = flags.notebooks or book.chapters(), Reference(book)
    chapters = [chapter.read_chapter(path) for path in paths]
    if flags.short:
        chapters = [chapter.shortened(each) for each in chapters]
    done = execute.execute(
        zip(paths, chapters, strict=True), project=book, force=flags.force,
        device=pick_device(flags.device), at_once=2 if flags.short else 1,
    )  # fmt: skip
    ran = {
        f"{book.relative(path)}": _compare(run, reference, path.stem)
        for path, run in zip(paths, done, strict=True)
    }
    for name, result in ran.items():
        for figure, change in (result["moved"] or {}).items():
            print(f"{name}: figure {figure}: {change}", file=sys.stderr)
    write_json(flags.json, {"chapters": ran})
    if any(result["failed"] for result in ran.values()):
        return 1
    return DRIFTED if any(result["moved"] for result in ran.values()) else 0


def _compare(run: NotebookNode, reference: Reference, name: str) -> dict[str, Any]:
    """What is written of a run; `moved` is None if its figures are not compared."""
    figures, failed = chapter.claimed(run), run.metadata.get("failed")
    moved = None
    if not run.metadata.get("shortened"):
        moved = reference.drift(name, figures, complete=failed is None)
    seconds = run.metadata["seconds"]
    return {"seconds": seconds, "failed": failed, "figures": figures, "moved": moved}
