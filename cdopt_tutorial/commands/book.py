"""`cdopt-tutorial execute` and `build`: run the chapters, and render the book."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.commands import Failed, check_writable, read_flags, write_json
from cdopt_tutorial.publish import chapter, execute, project, render
from cdopt_tutorial.publish.reference import Reference


@dataclass(frozen=True)
class Flags:
    """What to run, and how."""

    notebooks: Positional[tuple[Path, ...]] = ()  #: chapters, by default all
    force: bool = False  #: run even if a valid result is cached
    short: bool = False  #: run what has no result in its short profile, two at a time
    device: str = "cpu"  #: auto, cpu, cuda or cuda:N, to compute on
    json: Path | None = None  #: write the results to this file


def run(name: str, arguments: list[str]) -> int:
    """Run chapters and, to build the book, render all pages; see :func:`.cli.main`."""
    flags = read_flags(name, Flags, arguments)
    if name == "build" and flags.notebooks:
        raise ValueError("build takes no notebooks: execute runs single chapters")
    check_writable(flags.json)
    book = project.this_project()
    book.device, book.short = pick_device(flags.device), flags.short
    if name == "execute":
        return run_chapters(book, flags)
    render.read_config(book)  # rather than fail after minutes
    failed = run_chapters(book, flags) == 1
    if not render.render(book):
        raise Failed("the pages do not build cleanly: a warning is an error")
    if failed:
        print("a chapter failed: its page says what to do", file=sys.stderr)
    print(f"the book: {book.relative(book.html / 'index.html')}")
    return int(failed)


def run_chapters(book: project.Project, flags: Flags) -> int:
    """Run chapters, and compare and write their figures."""
    paths, reference = flags.notebooks or book.chapters(), Reference(book)
    ran = {}
    done = execute.execute(book, paths, force=flags.force)
    for path, run in zip(paths, done, strict=True):
        name, moved = book.relative(path), reference.drift(path.stem, run)
        ran[name] = {
            "seconds": run.metadata["seconds"],
            "failed": run.metadata.get("failed"),
            "figures": chapter.claimed(run),
            "moved": moved,
        }
        for figure, change in (moved or {}).items():
            print(f"{name}: figure {figure}: {change}", file=sys.stderr)
    write_json(flags.json, {"chapters": ran})
    if any(result["failed"] for result in ran.values()):
        return 1
    return 3 if any(result["moved"] for result in ran.values()) else 0
