"""Every page in a browser: offline, quiet, and readable on a desk and on a phone."""

import itertools
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import sync_playwright

SIZES = {
    "desk": {"width": 1280, "height": 800},
    "phone": {"width": 390, "height": 844},
}
THEMES = ("light", "dark")

# What a page tells of itself, once it has settled.
LOOK = """async () => {
    if (window.MathJax?.startup) await MathJax.startup.promise;
    const all = (kind) => [...document.querySelectorAll(`article :is(${kind})`)];
    const named = (e) => (e.alt ?? e.getAttribute('aria-label') ?? '').trim();
    return {
        wide: document.documentElement.scrollWidth - window.innerWidth,
        theme: document.documentElement.dataset.theme,
        unnamed: all('img, svg[role=img]:not([aria-hidden]), video')
            .filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 200)),
        broken: all('img').filter((e) => !e.naturalWidth).map((e) => e.src),
        maths: all('.math').length,
        rendered: all('.math mjx-container svg').length,
    };
}"""


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and says nothing of it."""

    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def server(site):
    handler = partial(Quiet, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def root(request, site):
    """The address under which the pages are opened: served, or from the disk."""
    if request.param == "file":
        return site.as_uri()
    return request.getfixturevalue("server")


def pages(site, root) -> list[str]:
    """The paths of all pages to look at."""
    found = sorted(page.relative_to(site) for page in site.rglob("*.html"))
    # The first page only leads to the front page; that of a missing page needs a
    # server; the rest is the theme's.
    left_out = {"index.html"} | ({"404.html"} if root.startswith("file") else set())
    names = [str(page) for page in found if page.parts[0] != "_static"]
    return [name for name in names if name not in left_out]


@pytest.mark.parametrize("root", ["http", "file"], indirect=True)
def test_every_page_is_offline_quiet_and_fits(browser, site, root):
    page = browser.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("console", lambda said: faults.append(said.text) if is_bad(said) else None)
    page.on(
        "request",
        lambda asked: None if is_ours(asked.url, root) else faults.append(asked.url),
    )
    page.on(
        "requestfailed",
        # What is still under way when the page is left is aborted, and no fault.
        lambda asked: (
            None
            if asked.failure == "net::ERR_ABORTED"
            else faults.append(f"failed: {asked.url}")
        ),
    )
    for name in pages(site, root):
        page.goto(f"{root}/{name}", wait_until="load")
        # One visit for all: a page takes seconds to load, and follows at once when
        # the window or the reader's wish for dark pages changes.
        for size, theme in itertools.product(SIZES, THEMES):
            page.set_viewport_size(SIZES[size])
            page.emulate_media(color_scheme=theme)
            seen = page.evaluate(LOOK)
            at = (name, size, theme)
            assert not faults, (at, faults)
            assert seen["wide"] <= 0, at
            assert seen["theme"] == theme, at
            assert seen["unnamed"] == seen["broken"] == [], at
            assert seen["maths"] <= seen["rendered"], at
    page.close()


def is_bad(said) -> bool:
    """Tell whether a message of the console is a complaint."""
    return said.type in ("error", "warning")


def is_ours(url: str, root: str) -> bool:
    """Tell whether a request stays on this page's host."""
    return url.startswith((root, "data:", "blob:"))


def test_front_page_leads_to_every_chapter(browser, site, server, project):
    page = browser.new_page()
    page.goto(f"{server}/index.html")
    page.wait_for_url("**/book/index.html")
    links = page.eval_on_selector_all("main a[href]", "all => all.map(a => a.href)")
    for chapter in project.chapters():
        assert f"{server}/notebooks/{chapter.stem}.html" in links
    page.close()


def test_search_finds_a_word_offline(browser, server):
    page = browser.new_page()
    page.goto(f"{server}/search.html?q=constraint")
    page.wait_for_selector("#search-results li")
    page.close()


def test_figures_take_the_colour_of_the_page(browser, site, server, project):
    """Drawn in the page's text colour: dark on light, light on dark."""
    inks = {}
    for theme in THEMES:
        context = browser.new_context(color_scheme=theme)
        page = context.new_page()
        page.goto(f"{server}/notebooks/{project.chapters()[0].stem}.html")
        inks[theme] = page.eval_on_selector_all(
            "figure.tutorial-output svg",
            "all => all.map(e => getComputedStyle(e).color)",
        )
        outer = page.eval_on_selector_all(
            ".text_html:has(.tutorial-output)",
            "all => all.map(e => getComputedStyle(e).backgroundColor)",
        )
        assert set(outer) == {"rgba(0, 0, 0, 0)"}
        context.close()
    assert inks["light"] and not set(inks["light"]) & set(inks["dark"])


def test_videos_play(browser, server, project):
    """The browser can decode them, without any network."""
    page = browser.new_page()
    for chapter in project.chapters():
        page.goto(f"{server}/notebooks/{chapter.stem}.html")
        states = page.eval_on_selector_all(
            "main video",
            """all => Promise.all(all.map(async (video) => {
                await video.play();
                return video.videoWidth > 0 && !video.error;
            }))""",
        )
        assert all(states)
    page.close()
