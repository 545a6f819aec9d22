"""The book on paper: one page with everything, printed by Chromium as vectors."""

import shutil
from pathlib import Path

import yaml

from cdopt_tutorial.publish.markdown import ON_SCREEN_ONLY
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.render import RenderError, run_builder

# Unfolds everything but the code that only draws.
_UNFOLD = """async () => {
    await window.MathJax?.startup?.promise;
    document.querySelectorAll('.toggle-hidden').forEach((e) => {
        e.classList.remove('toggle-hidden');
    });
    document.querySelectorAll('details:not(.hide)').forEach((e) => { e.open = true; });
}"""
_SHEET = {"format": "A4", "tagged": True, "outline": True, "print_background": True}
_SHEET["margin"] = dict.fromkeys(("top", "bottom", "left", "right"), "18mm")


def find_chromium() -> str | None:
    """The path of a browser that can print, or None."""
    names = "chromium", "chromium-browser", "google-chrome"
    return next(filter(None, map(shutil.which, names)), None)


def print_pages(project: Project) -> Path:
    """Print the pages that `render` has made into `_build/book.pdf`; return its path.

    The package's API and the list of tests are left out. Raises RenderError if there is
    no Chromium.
    """
    from playwright.sync_api import sync_playwright  # nothing else needs a browser

    if (chromium := find_chromium()) is None:
        raise RenderError("no Chromium to print with: apt-get install chromium")
    print("printing the pages", flush=True)
    config = yaml.safe_load((project.build / "config.yml").read_text("utf-8"))
    left_out = config.setdefault("exclude_patterns", [])
    left_out += [f"{page}*" for page in ON_SCREEN_ONLY]
    path = project.build / "paper.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    run_builder(project, config=path, builder="singlehtml", strict=False)
    folder = project.html.with_name("singlehtml")
    # Its links are relative to the top folder.
    pages = shutil.copy(folder / "book/index.html", folder / "whole.html")
    with sync_playwright() as playwright:
        how = {"executable_path": chromium, "args": ["--no-sandbox", "--disable-gpu"]}
        page = playwright.chromium.launch(**how).new_page()
        page.goto(Path(pages).as_uri(), wait_until="load")
        page.evaluate(_UNFOLD)
        page.pdf(path=project.build / "book.pdf", **_SHEET)
    return project.build / "book.pdf"
