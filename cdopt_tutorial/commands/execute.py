"""`cdopt-tutorial execute`: run the chapters, compare their figures."""

import argparse
import sys
from pathlib import Path

from cdopt_tutorial import whole_file
from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.checks import at_least
from cdopt_tutorial.commands.common import add_device, add_json, bad_input, write_json
from cdopt_tutorial.publish import chapter, execute, project
from cdopt_tutorial.publish.execute import Execution
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference

DRIFTED = 3  # exit code if all chapters ran and a figure moved
Moved = dict[Path, dict[str, str]]  # how figures moved, by chapter and name


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = "exit code 1: a chapter failed; 3: all ran, but a figure moved"
    flag = parser.add_argument
    which = "path of a chapter (default: all chapters)"
    flag("notebooks", metavar="NOTEBOOK", nargs="*", type=Path, help=which)
    flag("--force", action="store_true", help="run even if a valid result is cached")
    either = parser.add_mutually_exclusive_group()
    short = "run the chapters' short profiles, two at a time"
    either.add_argument("--short", action="store_true", help=short)
    values = "set a parameter of every chapter that is run; figures are not compared"
    either.add_argument(
        "-p", "--parameter", dest="values", action="append", help=values,
        nargs=2, metavar=("NAME", "VALUE"),
    )  # fmt: skip
    hung = "seconds after which a cell counts as hung (default: %(default)s)"
    limit = execute.CELL_TIMEOUT
    flag("--cell-timeout", type=int, metavar="N", default=limit, help=hung)
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run chapters; return 1 if one failed, else DRIFTED if a figure moved."""
    with bad_input():  # all that can be refused before minutes have passed
        at_least(args, 1, "cell_timeout")
        book = project.this_project()
        args.device = pick_device(args.device)  # `build` reads it again
        reference = Reference(book)
        paths = args.notebooks or book.chapters()
        chapters = [_read(path, book, args) for path in paths]
        book.results.mkdir(parents=True, exist_ok=True)
        whole_file.attempt(book.results / "a result")
    done = execute.execute(
        chapters, project=book, device=args.device, force=args.force,
        at_once=2 if args.short else 1, cell_timeout=args.cell_timeout,
    )  # fmt: skip
    # A reader's own notebook has no reference, and a set parameter changes figures.
    whole = [e for e in done if e.path.resolve() in book.chapters()]
    whole = [e for e in whole if not e.notebook.metadata.get("injected")]
    moved = {
        e.path: reference.drift(e.path.stem, e.figures, complete=e.error is None)
        for e in whole
    }
    ran = {f"{book.relative(e.path)}": _as_json(e, moved.get(e.path)) for e in done}
    write_json(args.json, {"chapters": ran})
    return _report(done, moved, book)


def _read(path: Path, book: Project, args: argparse.Namespace) -> tuple:
    """Read a chapter as it is to be run, with its path."""
    values = {name: chapter.read_value(text) for name, text in args.values or []}
    try:
        notebook = chapter.read_chapter(path, values)
        return path, chapter.shortened(notebook) if args.short else notebook
    except ValueError as error:
        raise ValueError(f"{book.relative(path)}: {error}") from error


def _as_json(result: Execution, moved: dict[str, str] | None) -> dict:
    names = "seconds", "error", "why", "figures"
    return {name: getattr(result, name) for name in names} | {"moved": moved}


def _report(done: list[Execution], moved: Moved, book: Project) -> int:
    """Print how each chapter ended, and what moved; return the exit code."""
    for result in done:
        name = book.relative(result.path)
        how = "reused the result of a run of" if result.cached else "ran for"
        if result.error:
            print(f"\n{result.error}", file=sys.stderr)
        else:
            print(f"{name}: {how} {result.seconds:.1f} s")
        for figure, change in moved.get(result.path, {}).items():
            print(f"{name}: figure {figure}: {change}", file=sys.stderr)
        if result.path not in moved:
            print(f"{name}: its figures were not compared")
    if any(result.error for result in done):
        return 1
    if any(moved.values()):
        return DRIFTED
    if moved:
        print("no figure has moved")
    return 0
