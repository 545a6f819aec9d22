"""Every page in a browser: offline, quiet, readable on any screen and by everyone."""

import itertools
from typing import NamedTuple

import pytest
from browsing import FRONT, SIZES, THEMES, barriers, is_ours, pages

pytestmark = pytest.mark.xdist_group("book")

API, SOURCES = "book/api/", "_modules/cdopt_tutorial/"

# What a page tells of itself, once it has settled and taken the theme that was wished
# for; it does so in a moment.
LOOK = """async (theme) => {
    const follows = () => document.documentElement.dataset.theme === theme;
    for (let k = 0; k < 1000 && !follows(); k++)
        await new Promise(requestAnimationFrame);
    if (window.MathJax?.startup) await MathJax.startup.promise;
    const all = (kind) => [...document.querySelectorAll(`article :is(${kind})`)];
    // The sign behind a formula, if it stands on the next line.
    const behind = document.createRange();
    const astray = (e) => {
        const next = e.nextSibling;
        if (next?.nodeType !== 3 || !/^[.,;:?!)]/.test(next.data)) return false;
        behind.setStart(next, 0);
        behind.setEnd(next, 1);
        const sign = behind.getBoundingClientRect();
        return sign.height && sign.top >= [...e.getClientRects()].at(-1).bottom - 2;
    };
    const named = (e) => (e.alt ?? e.getAttribute('aria-label') ?? '').trim();
    return {
        follows: follows(),
        wide: document.documentElement.scrollWidth - window.innerWidth,
        unnamed: all('img, svg[role=img]:not([aria-hidden]), video')
            .filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 200)),
        broken: all('img').filter((e) => !e.naturalWidth).map((e) => e.src),
        astray: all('mjx-container').filter(astray)
            .map((e) => e.textContent + e.nextSibling.data.slice(0, 9)),
        maths: all('.math').length,
        rendered: all('.math mjx-container svg').length,
    };
}"""

# One of each kind of token, and an empty frame for each drawing: axe takes a minute
# for a page of the package, nearly all of it for thousands of words that look alike.
THIN = """() => {
    document.querySelectorAll('svg > :not(title)').forEach((e) => e.remove());
    const shape = (e) => e && `${shape(e.parentElement)}>${e.tagName}.${e.className}`;
    const alike = document.querySelectorAll(`:is(pre, code, dl.py, .genindextable,
        .toc-entry) :is(a, code, em, p, span, strong):not(button *, a *)`);
    const seen = new Set();
    for (const e of [...alike].reverse()) {
        const kind = shape(e);
        if (!e.childElementCount && seen.has(kind)) e.remove();
        seen.add(kind);
    }
}"""


class Visits(NamedTuple):
    """What was seen of all pages."""

    looks: dict[tuple, dict]  #: what a page tells, by its name, the screen, the theme
    barriers: dict[tuple, list[str]]  #: what keeps someone out, by name and look


# One visit for all: a page takes a second to load, and follows at once when the window
# or the reader's wish for dark pages changes.
@pytest.fixture(scope="module")
def visits(browser, site, root, project) -> Visits:
    page = browser.new_page()
    faults, found = [], Visits({}, {})
    watch(page, root, faults)
    names = one_of(SOURCES, pages(site, root), site)
    asked = set() if root.startswith("file") else {*one_of(API, names, site)}
    scrolling = {FRONT, *(f"notebooks/{c.stem}.html" for c in project.chapters())}
    for name in names:
        show(page, *looks(name, root)[0])
        page.goto(f"{root}/{name}", wait_until="load")
        for size, theme in looks(name, root):
            show(page, size, theme)
            seen = page.evaluate(LOOK, theme)
            found.looks[name, size, theme] = seen | {"faults": faults.copy()}
        if name in asked:
            before = len(faults)
            found.barriers.update(ask_axe(page, name, name in scrolling))
            del faults[before:]  # axe looks for styles where none are
    page.close()
    return found


def watch(page, root: str, faults: list[str]) -> None:
    """Note what goes wrong on a page, and what it asks of others."""
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


def show(page, size: str, theme: str) -> None:
    """Look at a page, or the next one, on this screen and with this wish."""
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)


def ask_axe(page, name: str, scrolls: bool) -> dict[tuple, list[str]]:
    """What keeps someone out of a page, which is of no use any more."""
    page.add_style_tag(content="* { transition: none !important; }")
    found = {}
    if scrolls:
        show(page, "phone", "light")
        rule = {"runOnly": ["scrollable-region-focusable"]}
        found[name, "phone"] = barriers(page, rule)
    show(page, "desk", "light")
    page.evaluate(THIN)
    assert page.evaluate(LOOK, "light")["follows"]
    found[name, "light"] = barriers(page, {})
    show(page, "desk", "dark")
    assert page.evaluate(LOOK, "dark")["follows"]
    found[name, "dark"] = barriers(page, {"runOnly": ["color-contrast"]})
    return found


def one_of(folder: str, names: list[str], site) -> list[str]:
    """These pages, but of those of a folder, which are made alike, only the longest."""
    alike = [name for name in names if name.startswith(folder)]
    alike.remove(max(alike, key=lambda name: (site / name).stat().st_size))
    return [name for name in names if name not in alike]


@pytest.mark.parametrize("root", ["http", "file"], indirect=True)
def test_every_page_is_offline_quiet_and_fits(visits):
    assert visits.looks
    for at, seen in visits.looks.items():
        assert seen["follows"], at
        assert not seen["faults"], (at, seen["faults"])
        assert seen["wide"] <= 0, at
        assert seen["unnamed"] == seen["broken"] == seen["astray"] == [], at
        assert seen["maths"] <= seen["rendered"], at


@pytest.mark.parametrize("root", ["http"], indirect=True)
def test_nothing_on_any_page_keeps_anyone_out(visits, site, root, project):
    names = one_of(API, one_of(SOURCES, pages(site, root), site), site)
    phone = [FRONT, *(f"notebooks/{c.stem}.html" for c in project.chapters())]
    asked = {(name, look) for name in names for look in THEMES}
    # What scrolls on a phone can be reached.
    assert {*visits.barriers} == asked | {(name, "phone") for name in phone}
    assert not {key: what for key, what in visits.barriers.items() if what}


def looks(name: str, root: str) -> list[tuple[str, str]]:
    """The screens and themes with which to look at a page; at a chapter with each."""
    if root.startswith("file"):
        return [("phone", "dark")]
    if name.startswith("notebooks/"):
        return [*itertools.product(SIZES, THEMES)]
    return [("desk", "light"), ("phone", "dark")]


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
