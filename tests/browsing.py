"""What all tests of the pages need to look at them in a browser."""

from http.server import SimpleHTTPRequestHandler
from pathlib import Path

SIZES = {"desk": (1280, 800), "phone": (390, 844)}
THEMES = ("light", "dark")


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and says nothing of it."""

    def log_message(self, format, *args):
        pass


def pages(site: Path, root: str) -> list[str]:
    """The paths of all pages to look at: not those that only lead to another."""
    found = sorted(page.relative_to(site) for page in site.rglob("*.html"))
    # The page of a missing one needs a server; what is static is the theme's.
    left_out = {"404.html"} if root.startswith("file") else set()
    names = [str(page) for page in found if page.parts[0] != "_static"]
    return [n for n in names if n not in left_out and not leads_on(site / n)]


def leads_on(page: Path) -> bool:
    """Tell whether a page is a redirect: the first one, and the short addresses."""
    return 'http-equiv="refresh"' in page.read_text("utf-8").lower()


def is_ours(url: str, root: str) -> bool:
    """Tell whether a request stays on this page's host."""
    return url.startswith((root, "data:", "blob:"))
