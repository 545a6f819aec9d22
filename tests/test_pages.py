"""Every page in a browser: offline, quiet, and readable on a desk and on a phone."""

import itertools

import pytest
from browsing import SIZES, THEMES, is_ours, pages

# Whether the page has taken the theme that was wished for; it does so in a moment.
FOLLOWS = "(theme) => document.documentElement.dataset.theme === theme"

# What a page tells of itself, once it has settled.
LOOK = """async () => {
    if (window.MathJax?.startup) await MathJax.startup.promise;
    const all = (kind) => [...document.querySelectorAll(`article :is(${kind})`)];
    const named = (e) => (e.alt ?? e.getAttribute('aria-label') ?? '').trim();
    return {
        wide: document.documentElement.scrollWidth - window.innerWidth,
        unnamed: all('img, svg[role=img]:not([aria-hidden]), video')
            .filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 200)),
        broken: all('img').filter((e) => !e.naturalWidth).map((e) => e.src),
        maths: all('.math').length,
        rendered: all('.math mjx-container svg').length,
    };
}"""


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
        for size, theme in looks(name, root):
            width, height = SIZES[size]
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=theme)
            page.wait_for_function(FOLLOWS, arg=theme)
            seen = page.evaluate(LOOK)
            at = (name, size, theme)
            assert not faults, (at, faults)
            assert seen["wide"] <= 0, at
            assert seen["unnamed"] == seen["broken"] == [], at
            assert seen["maths"] <= seen["rendered"], at
    page.close()


def looks(name: str, root: str) -> list[tuple[str, str]]:
    """The screens and themes with which to look at a page.

    The many listings of sources differ in their text alone.
    """
    if root.startswith("file"):
        return [("phone", "dark")]
    if name.startswith("_modules/"):
        return [("desk", "light"), ("phone", "dark")]
    return [*itertools.product(SIZES, THEMES)]


def is_bad(said) -> bool:
    """Tell whether a message of the console is a complaint."""
    return said.type in ("error", "warning")


def test_front_page_leads_to_every_chapter(browser, site, server, project):
    page = browser.new_page()
    page.goto(f"{server}/index.html")
    page.wait_for_url("**/book/index.html")
    links = page.eval_on_selector_all("main a[href]", "all => all.map(a => a.href)")
    for chapter in project.chapters():
        assert f"{server}/notebooks/{chapter.stem}.html" in links
    page.close()
