"""`cdopt-tutorial execute` and `build`: run the chapters, render the book."""

import argparse
import sys
from pathlib import Path

from cdopt_tutorial.commands.common import add_device, bad_input, check_device


def add(commands) -> None:
    """Add the parsers."""
    execute = commands.add_parser(
        "execute", help="run chapters that have no result yet"
    )
    execute.add_argument(
        "notebooks",
        metavar="NOTEBOOK",
        type=Path,
        nargs="*",
        help="path of a chapter (default: all chapters)",
    )
    execute.add_argument(
        "--force", action="store_true", help="run even if a valid result is cached"
    )
    add_device(execute)
    execute.set_defaults(run=run_execute)
    build = commands.add_parser("build", help="run the chapters, then render the book")
    add_device(build)
    build.set_defaults(run=run_build, notebooks=[], force=False)


def run_execute(args: argparse.Namespace) -> int:
    """Run the chapters and print what became of each; 1 if one failed."""
    from cdopt_tutorial.publish.execute import execute
    from cdopt_tutorial.publish.project import this_project

    with bad_input():
        project = this_project()
        check_device(args.device)
        for path in args.notebooks:
            if not path.is_file():
                raise ValueError(f"no such notebook: {path}")
    notebooks = args.notebooks or project.chapters()
    done = execute(notebooks, project=project, device=args.device, force=args.force)
    for result in done:
        how = "reused the result of a run of" if result.cached else "ran for"
        if result.error is None:
            print(f"{project.relative(result.path)}: {how} {result.seconds:.1f} s")
    errors = [result.error for result in done if result.error is not None]
    for error in errors:
        print(f"\n{error}", file=sys.stderr)
    if not errors and all(result.cached for result in done):
        print("nothing changed: no chapter was run")
    return 1 if errors else 0


def run_build(args: argparse.Namespace) -> int:
    """Run the chapters and render the pages; 1 if either failed."""
    from cdopt_tutorial.publish.project import this_project
    from cdopt_tutorial.publish.render import RenderError, render

    failed = run_execute(args)
    if failed:
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
