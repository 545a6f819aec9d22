"""`cdopt-tutorial build`: run the chapters, then render the book."""

import argparse
import sys

from cdopt_tutorial.commands import execute
from cdopt_tutorial.commands.common import add_device, bad_input
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.publish.render import RenderError, render
from cdopt_tutorial.publish.site import edition, read_site


def add(parser: argparse.ArgumentParser) -> None:
    """Add the only flag; chapters are run as `execute` runs them without flags."""
    add_device(parser)
    parser.set_defaults(
        run=run,
        notebooks=[],
        force=False,
        profile="full",
        values=[],
        update_reference=False,
    )


def run(args: argparse.Namespace) -> int:
    """Run the chapters and render the pages; 1 if either failed.

    A figure that moved is named and doesn't stop the build: on another machine a
    reader wants the book all the same.
    """
    with bad_input():
        read_site()
        edition(this_project().root)
    failed = execute.run(args)
    if failed not in (0, execute.DRIFTED):
        return failed
    project = this_project()
    try:
        built = render(project, device=args.device)
    except RenderError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if not built:
        print("nothing changed: no page was rendered")
    print(f"the book: {project.relative(project.html / 'index.html')}")
    return 0
