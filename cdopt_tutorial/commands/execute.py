"""`cdopt-tutorial execute`: run the chapters, compare their figures."""

import argparse
import sys
from pathlib import Path

from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.checks import at_least
from cdopt_tutorial.commands.common import add_device, add_json, bad_input, write_json
from cdopt_tutorial.publish import chapter, execute, project, reference
from cdopt_tutorial.publish.execute import CELL_TIMEOUT
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.reference import Reference

DRIFTED = 3  # exit code if all chapters ran and a figure moved
Executions = list[execute.Execution]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = "exit code 1: a chapter failed; 3: all ran, but a figure moved"
    flag = parser.add_argument
    which = "path of a chapter (default: all chapters)"
    flag("notebooks", metavar="NOTEBOOK", nargs="*", type=Path, help=which)
    flag("--force", action="store_true", help="run even if a valid result is cached")
    either = parser.add_mutually_exclusive_group()
    short = "run the chapters' short profiles, two at a time, and report whole results"
    either.add_argument("--short", action="store_true", help=short)
    values = "set a parameter of every chapter that is run; figures are not compared"
    pairs = {"nargs": 2, "metavar": ("NAME", "VALUE"), "action": "append"}
    either.add_argument("-p", "--parameter", dest="values", help=values, **pairs)
    update = "add what this machine gave to notebooks/reference.toml"
    flag("--update-reference", action="store_true", help=update)
    anew = "the same, and forget what other runs gave before"
    flag("--anew", action="store_true", help=anew)
    hung = "seconds after which a cell counts as hung (default: %(default)s)"
    flag("--cell-timeout", metavar="N", type=int, default=CELL_TIMEOUT, help=hung)
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run chapters; return 1 if one failed, else DRIFTED if a figure remains moved."""
    updates = args.update_reference or args.anew
    with bad_input():
        at_least(args, 1, "cell_timeout")
        book = project.this_project()
        args.device = pick_device(args.device)  # `build` reads it again
        if updates and (args.values or args.short or args.device != "cpu"):
            raise ValueError("--update-reference is for whole runs on the cpu")
        was = Reference(book)
        values = {name: chapter.read_value(text) for name, text in args.values or []}
        chapters = _read(args.notebooks or book.chapters(), book, values)
        execute.make_place(book)  # rather than fail after minutes
    done = execute.execute(
        chapters, project=book, device=args.device, force=args.force,
        short=args.short, cell_timeout=args.cell_timeout,
    )  # fmt: skip
    keys = "seconds", "error", "why", "figures"
    found = {f"{book.relative(e.path)}": {k: getattr(e, k) for k in keys} for e in done}
    write_json(args.json, {"chapters": found})
    failed = _report(done, book)
    # A reader's own notebook has no reference, and a set parameter changes figures.
    own = [each for each in done if each.path.resolve() in book.chapters()]
    known = [each for each in own if not chapter.is_injected(each.notebook)]
    if len(known) < len(own):
        print("figures were not compared where parameters were set")
    moved = _compare(known, was)
    if updates:
        for result in (each for each in known if each.error is None):
            if args.anew:
                was.forget(result.path.stem)
            was.update(result.path.stem, result.figures, reference.origin())
        print("\nnow in the reference, but for bounds, which are yours to change:")
        moved = _compare(known, was)
    return failed or (DRIFTED if moved else 0)


def _read(paths: list[Path], book: Project, values: dict) -> execute.Chapters:
    """Read all chapters, with these parameters, before any of them runs."""
    chapters = []
    for path in paths:
        try:
            chapters.append((path, chapter.read_chapter(path, values)))
        except ValueError as error:
            raise ValueError(f"{book.relative(path)}: {error}") from error
    return chapters


def _report(done: Executions, book: Project) -> int:
    """Print how each chapter ended; return 1 if one failed, else 0."""
    for result in done:
        how = "reused the result of a run of" if result.cached else "ran for"
        if result.error:
            print(f"\n{result.error}", file=sys.stderr)
        else:
            print(f"{book.relative(result.path)}: {how} {result.seconds:.1f} s")
    return int(any(result.error for result in done))


def _compare(done: Executions, was: Reference) -> int:
    """Print every figure that moved, and return how many did."""
    moved = 0
    for result in done:
        name, complete = result.path.stem, result.error is None
        for figure, how in was.drift(name, result.figures, complete=complete).items():
            print(f"{name}: figure {figure}: {how}", file=sys.stderr)
            moved += 1
    if done and not moved and not any(result.error for result in done):
        print("no figure has moved")
    return moved
