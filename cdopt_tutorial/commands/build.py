"""`cdopt-tutorial build`: run the chapters, then render the book."""

import argparse
import sys

from cdopt_tutorial.commands import execute
from cdopt_tutorial.commands.common import add_device, bad_input
from cdopt_tutorial.publish import project, render, site


def add(parser: argparse.ArgumentParser) -> None:
    """Add the only flag; chapters are run as `execute` runs them without flags."""
    without_flags = argparse.ArgumentParser()
    execute.add(without_flags)
    add_device(parser)
    parser.set_defaults(**vars(without_flags.parse_args([])) | {"run": run})


def run(args: argparse.Namespace) -> int:
    """Run the chapters and render the pages; 1 if either failed.

    A figure that moved is named and doesn't stop the build: on another machine a
    reader wants the book all the same.
    """
    with bad_input():
        site.read_site()
        site.edition(project.this_project().root)
    failed = execute.run(args)
    if failed not in (0, execute.DRIFTED):
        return failed
    book = project.this_project()
    try:
        built = render.render(book, device=args.device)
    except render.RenderError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if not built:
        print("nothing changed: no page was rendered")
    print(f"the book: {book.relative(book.html / 'index.html')}")
    return 0
