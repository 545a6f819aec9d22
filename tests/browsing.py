"""What all tests need that open pages in a browser."""

import json
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from hosts import PATIENCE

FRONT = "book/index.html"
SIZES = {"desk": (1280, 800), "phone": (390, 844)}
THEMES = ("light", "dark")


# Skip a page's questions, which lock what follows; 0.3 s later the theme makes what
# scrolls a stop of Tab.
REVEAL = """async () => {
    const skip = () => document.querySelector('.guess-form button[type=button]');
    if (!skip()) return;
    while (skip()) skip().click();
    await new Promise((done) => setTimeout(done, 600));
}"""

# Docutils calls a bibliography a list, with the numbers as its direct children.
THEIRS = 'aria-required-children: <div role="list" class="citation-list">'


def new_context(browser, **how):
    """A context that waits for as long as a busy machine may need."""
    context = browser.new_context(**how)
    context.set_default_timeout(1000 * PATIENCE)
    return context


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    protocol_version = "HTTP/1.1"  # one connection for a page's 27 files

    def log_message(self, format, *args):
        pass


def pages(site: Path, root: str) -> list[str]:
    """The paths of all pages but redirects."""
    found = [page.relative_to(site) for page in site.rglob("*.html")]
    # The page of a 404 error needs a server; the static ones are the theme's.
    left_out = {"404.html"} if root.startswith("file") else set()
    names = {str(page) for page in found if page.parts[0] != "_static"} - left_out
    redirect = 'http-equiv="refresh"'
    return sorted(n for n in names if redirect not in (site / n).read_text().lower())


def barriers(page, options: dict, *parts: str) -> list[str]:
    """What axe calls serious or critical in a page, or in parts, but for `THEIRS`."""
    # Half a megabyte, so only once for each page.
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(Axe().axe_script)
    # It would fetch the styles again, for a rule that is off.
    options = json.dumps({"resultTypes": ["violations"], "preload": False, **options})
    where = json.dumps({"include": [[part] for part in parts or ("html",)]})
    violations = page.evaluate(f"axe.run({where}, {options})")["violations"]
    found = [
        f"{each['id']}: {node['html'][:200]}"
        for each in violations
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]
    return [each for each in found if not each.startswith(THEIRS)]
