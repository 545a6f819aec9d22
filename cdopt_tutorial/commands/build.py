"""`cdopt-tutorial build`: run the chapters, then render the book."""

import argparse
import sys

from cdopt_tutorial.commands import execute
from cdopt_tutorial.commands.common import add_device, bad_input
from cdopt_tutorial.publish import config, project, render


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags; chapters are run as `execute` runs them without flags."""
    without_flags = argparse.ArgumentParser()
    execute.add(without_flags)
    add_device(parser)
    parser.set_defaults(**vars(without_flags.parse_args([])))


def run(args: argparse.Namespace) -> int:
    """Run the chapters and render all pages; return 1 if either failed."""
    with bad_input():
        book = project.this_project()
        config.read_config(book)  # rather than fail after minutes
    failed = execute.run(args) not in (0, execute.DRIFTED)
    try:
        if not render.render(book, device=args.device):
            print("nothing changed: no page was rendered")
    except render.RenderError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if failed:
        print("a chapter failed: its page says what to do", file=sys.stderr)
    print(f"the book: {book.relative(book.html / 'index.html')}")
    return int(failed)
