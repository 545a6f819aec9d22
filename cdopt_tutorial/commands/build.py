"""`cdopt-tutorial build`: run the chapters, then render the book."""

import argparse
import sys

from cdopt_tutorial.commands import execute
from cdopt_tutorial.commands.common import add_device, bad_input
from cdopt_tutorial.publish import paper, project, render, site


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags; chapters are run as `execute` runs them without flags."""
    without_flags = argparse.ArgumentParser()
    execute.add(without_flags)
    add_device(parser)
    on_paper = "print the pages into _build/book.pdf as well, by Chromium"
    parser.add_argument("--pdf", action="store_true", help=on_paper)
    parser.set_defaults(**vars(without_flags.parse_args([])))


def run(args: argparse.Namespace) -> int:
    """Run the chapters and render all pages; return 1 if either failed."""
    with bad_input():
        book = project.this_project()
        site.read_site()
    failed = execute.run(args) not in (0, execute.DRIFTED)
    try:
        built = render.render(book, device=args.device)
        printed = paper.print_pages(book) if args.pdf else None
    except render.RenderError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if not built:
        print("nothing changed: no page was rendered")
    if failed:
        print("a chapter failed: its page says what to do", file=sys.stderr)
    for made in filter(None, (book.html / "index.html", printed)):
        print(f"the book: {book.relative(made)}")
    return int(failed)
