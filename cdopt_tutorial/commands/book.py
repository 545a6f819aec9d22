"""`cdopt-tutorial execute` and `build`: run the chapters, and render the book."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.commands import Failed, check_writable, read_flags, write_json
from cdopt_tutorial.publish import chapter, execute, project, render
from cdopt_tutorial.publish.reference import Reference

DRIFTED = 3  # exit code if all chapters ran and a figure moved


@dataclass(frozen=True)
class Flags:
    """What to run, and how."""

    notebooks: Positional[tuple[Path, ...]] = ()  #: chapters, by default all
    force: bool = False  #: run even if a valid result is cached
    short: bool = False  #: run what has no result in its short profile, two at a time
    device: str = "cpu"  #: auto, cpu, cuda or cuda:N, to compute on
    json: Path | None = None  #: write the results to this file


@dataclass(frozen=True)
class BuildFlags:
    """Chapters are run as `execute` runs them with no other flag."""

    device: str = "cpu"  #: auto, cpu, cuda or cuda:N, to compute on


def run(name: str, arguments: list[str]) -> int:
    """Run chapters and, to build the book, render all pages."""
    if name == "execute":
        return run_chapters(read_flags(name, Flags, arguments))
    device = pick_device(read_flags(name, BuildFlags, arguments).device)
    book = project.this_project()
    render.read_config(book)  # rather than fail after minutes
    failed = run_chapters(Flags(device=device)) == 1
    if not render.render(book, device=device):
        raise Failed("the pages do not build cleanly: a warning is an error")
    if failed:
        print("a chapter failed: its page says what to do", file=sys.stderr)
    print(f"the book: {book.relative(book.html / 'index.html')}")
    return int(failed)


def run_chapters(flags: Flags) -> int:
    """Run chapters; return 1 if one failed, else DRIFTED if a figure moved."""
    check_writable(flags.json)
    book = project.this_project()
    paths, reference = flags.notebooks or book.chapters(), Reference(book)
    done = execute.execute(
        paths, project=book, device=pick_device(flags.device),
        force=flags.force, short=flags.short,
    )  # fmt: skip
    ran = {}
    for path, run in zip(paths, done, strict=True):
        name, moved = f"{book.relative(path)}", reference.drift(path.stem, run)
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
    return DRIFTED if any(result["moved"] for result in ran.values()) else 0
