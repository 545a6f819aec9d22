"""`cdopt-tutorial build`: run the chapters, then render the book."""

import sys
from dataclasses import dataclass

from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.commands import Failed, execute, read_flags
from cdopt_tutorial.publish import project, render


@dataclass(frozen=True)
class Flags:
    """Chapters are run as `execute` runs them with no other flag."""

    device: str = "cpu"  #: auto, cpu, cuda or cuda:N, to compute on


def run(arguments: list[str]) -> int:
    """Run the chapters and render all pages; return 1 if a chapter failed."""
    device = pick_device(read_flags("build", Flags, arguments).device)
    book = project.this_project()
    render.read_config(book)  # rather than fail after minutes
    failed = execute.run_chapters(execute.Flags(device=device)) == 1
    if not render.render(book, device=device):
        raise Failed("the pages do not build cleanly: a warning is an error")
    if failed:
        print("a chapter failed: its page says what to do", file=sys.stderr)
    print(f"the book: {book.relative(book.html / 'index.html')}")
    return int(failed)
