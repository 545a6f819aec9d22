"""`cdopt-tutorial execute`: run the chapters, compare their figures."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from nbformat import NotebookNode
from tyro.conf import Positional, UseAppendAction, arg

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
    #: set a parameter of every chapter that is run; figures are not compared
    parameter: Annotated[
        UseAppendAction[tuple[tuple[str, str], ...]],
        arg(aliases=["-p"], metavar="NAME VALUE"),
    ] = ()
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
    chapters = [(path, _read(path, flags)) for path in paths]
    device, at_once = pick_device(flags.device), 2 if flags.short else 1
    done = execute.execute(
        chapters, project=book, device=device, force=flags.force, at_once=at_once
    )
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


def _read(path: Path, flags: Flags) -> NotebookNode:
    """A chapter as it is to be run."""
    notebook = chapter.read_chapter(path)
    if flags.short:
        notebook = chapter.shortened(notebook)
    if flags.parameter:
        values = {name: chapter.read_value(text) for name, text in flags.parameter}
        chapter.inject(notebook, values)
    return notebook


def _compare(run: NotebookNode, reference: Reference, name: str) -> dict[str, Any]:
    """What is written of a run; `moved` is None if its figures are not compared."""
    figures, failed = chapter.claimed(run), run.metadata.get("failed")
    moved = None
    if not run.metadata.get("injected"):
        moved = reference.drift(name, figures, complete=failed is None)
    seconds = run.metadata["seconds"]
    return {"seconds": seconds, "failed": failed, "figures": figures, "moved": moved}
