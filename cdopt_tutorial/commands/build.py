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
    """Run the chapters and render the pages, whatever figure moved; 1 if one failed."""
    with bad_input():
        book = project.this_project()
        site.read_site()
        site.edition(book.root)
    failed = execute.run(args)
    if failed not in (0, execute.DRIFTED):
        return failed
    try:
        built = render.render(book, device=args.device)
    except render.RenderError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if not built:
        print("nothing changed: no page was rendered")
    print(f"the book: {book.relative(book.html / 'index.html')}")
    return 0
