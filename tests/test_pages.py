"""Every page in a browser: offline, without errors, readable, and by keyboard."""

import itertools
from typing import NamedTuple

import pytest
from browsing import (
    FRONT,
    REVEAL,
    SIZES,
    THEMES,
    barriers,
    is_ours,
    new_context,
    pages,
)

pytestmark = pytest.mark.xdist_group("book")

# A phone first: whether something scrolls, and so is a stop of Tab, is decided on load.
LOOKS = [*itertools.product(("phone", "desk"), THEMES)]

# What a page shows once its formulas are set and it follows the preferred theme.
LOOK = """async (theme) => {
    const follows = () => document.documentElement.dataset.theme === theme;
    for (let k = 0; k < 1000 && !follows(); k++)
        await new Promise(requestAnimationFrame);
    if (window.MathJax?.startup) await MathJax.startup.promise;
    const all = (kind) => [...document.querySelectorAll(`article :is(${kind})`)];
    // A punctuation mark after a formula that has slipped to the next line.
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
    const start = (e) => e.outerHTML.slice(0, 200);
    const large = (e) => Math.min(e.clientWidth, e.clientHeight) > 99;
    const drawn = (e) => large(e) && e.querySelectorAll('path, text, use').length > 9;
    const set = (e) => e.querySelector('mjx-container svg')?.clientWidth > 0;
    const figures = all('figure:not([data-turn]) svg'), maths = all('.math');
    return {
        follows: follows(),
        wide: document.documentElement.scrollWidth - window.innerWidth,
        unnamed: all('img, svg[role=img]:not([aria-hidden])')
            .filter((e) => !named(e)).map(start),
        nowhere: all('a[href]').filter((e) => !e.textContent.trim()).map(start),
        broken: all('img').filter((e) => !e.naturalWidth).map((e) => e.src),
        astray: all('mjx-container').filter(astray)
            .map((e) => e.textContent + e.nextSibling.data.slice(0, 9)),
        unseen: [
            ...figures.filter((e) => !drawn(e)), ...maths.filter((e) => !set(e)),
        ].map(start),
        figures: figures.length, maths: maths.length,
        questions: all('.guess-place').length,
        answers: all('details.guess').length,
        open: all('details.guess:not([hidden])').map(start),
    };
}"""

# Empty each drawing, or axe takes a minute for a chapter.
THIN = """() =>
    document.querySelectorAll('svg > :not(title)').forEach((e) => e.remove())"""
# One page of each kind.
ASKED = [FRONT, "notebooks/06_shards.html", "book/errors.html", "book/api/data.html"]
ASKED += ["book/glossary.html", "_modules/cdopt_tutorial/equality.html"]
ASKED += ["genindex.html", "search.html", "404.html"]


class Visits(NamedTuple):
    """What was found on all pages."""

    looks: dict[tuple, dict]  #: by page, screen, and theme
    barriers: dict[tuple, list[str]]  #: found by axe, by page and theme


# One visit for all: a page takes a second to load, but follows at once when the size of
# the window or the preferred theme changes.
@pytest.fixture(scope="module")
def visits(browser, site, root) -> Visits:
    served = root.startswith("http")
    context = new_context(browser, offline=not served)
    page, faults, found = context.new_page(), [], Visits({}, {})
    watch(page, root, faults)
    for number, name in enumerate(chosen(site, root)):
        every = served and name.startswith(("notebooks/", FRONT))
        looks = LOOKS if every else [LOOKS[number % len(LOOKS)]]
        show(page, *looks[0])
        page.goto(f"{root}/{name}", wait_until="load")
        page.evaluate(REVEAL)
        if every:  # can everything that scrolls on a phone be reached?
            rule = {"runOnly": ["scrollable-region-focusable"]}
            found.barriers[name, "phone"] = barriers(page, rule)
        for size, theme in looks:
            show(page, size, theme)
            seen = page.evaluate(LOOK, theme)
            found.looks[name, size, theme] = seen | {"faults": faults.copy()}
        if served and name in ASKED:
            found.barriers.update(ask_axe(page, name))
    context.close()
    return found


def chosen(site, root: str) -> list[str]:
    """The pages to visit: all but the package's modules; from the disk, chapters."""
    all_of = ("notebooks/",)
    if root.startswith("http"):
        names = pages(site, root)
        all_of = tuple(n for n in names if not n.startswith("_modules/cdopt_tutorial/"))
    return [n for n in pages(site, root) if n.startswith(all_of) or n in ASKED]


def watch(page, root: str, faults: list[str]) -> None:
    """Note a page's errors, and its requests to other hosts."""

    def on_console(message) -> None:
        if message.type in ("error", "warning"):
            faults.append(message.text)

    def on_request(request) -> None:
        if not is_ours(request.url, root):
            faults.append(request.url)

    def on_failed(request) -> None:
        # Leaving a page aborts what is still loading, which is no fault.
        if request.failure != "net::ERR_ABORTED":
            faults.append(f"failed: {request.url}")

    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("console", on_console)
    page.on("request", on_request)
    page.on("requestfailed", on_failed)


def show(page, size: str, theme: str) -> None:
    """Look at this page and the next ones on this screen, preferring this theme."""
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)


def ask_axe(page, name: str) -> dict[tuple, list[str]]:
    """What axe finds on a page in both themes, which is spoilt by this."""
    page.add_style_tag(content="* { transition: none !important; }")
    page.evaluate(THIN)
    found = {}
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        assert page.evaluate(LOOK, theme)["follows"]
        found[name, theme] = barriers(page, {})
    return found


@pytest.mark.parametrize("root", ["http", "file"], indirect=True)
def test_every_page_is_offline_quiet_and_fits(visits):
    assert visits.looks
    for at, seen in visits.looks.items():
        assert seen["follows"], at
        assert not seen["faults"], (at, seen["faults"])
        assert seen["wide"] <= 0, at
        for wrong in ("unnamed", "nowhere", "broken", "astray", "open", "unseen"):
            assert seen[wrong] == [], at
        is_chapter = at[0].startswith("notebooks/")
        assert seen["questions"] == seen["answers"] >= 2 * is_chapter, at
        assert seen["figures"] or not is_chapter, at
    for kind in "figures", "maths":
        assert any(seen[kind] for seen in visits.looks.values()), kind


@pytest.mark.parametrize("root", ["http"], indirect=True)
def test_no_kind_of_page_keeps_anyone_out(visits):
    assert {*ASKED} <= {name for name, _ in visits.barriers}
    assert not {key: what for key, what in visits.barriers.items() if what}


# What has the focus, and whether that can be seen.
FOCUS = """() => {
    const e = document.activeElement, box = e.getBoundingClientRect();
    const look = () => {
        const {outline, boxShadow, border, backgroundColor} = getComputedStyle(e);
        return [outline, boxShadow, border, backgroundColor].join();
    };
    const focused = look();
    e.blur();
    const framed = look() !== focused;
    e.focus({preventScroll: true});
    const inside = box.bottom > 0 && box.top < innerHeight
        && box.right > 0 && box.left < innerWidth;
    const drawn = getComputedStyle(e).opacity > 0;
    return [e.outerHTML.slice(0, 160), framed && inside && drawn];
}"""


def test_tab_reaches_what_a_chapter_offers_and_is_seen(page, server, project):
    show(page, "desk", "light")
    page.goto(f"{server}/notebooks/01_reinforce.html")
    page.add_style_tag(content="* { transition: none !important; }")
    page.wait_for_function("MathJax.startup.promise.then(() => true)")
    stops: list[str] = []
    while len(stops) < 2 or stops[-1] != stops[0]:  # the way round
        assert len(stops) < 2000
        page.keyboard.press("Tab")
        stop, seen = page.evaluate(FOCUS)
        assert seen or stop.startswith("<body"), stop
        stops.append(stop)
    assert "#main-content" in stops[0]
    wanted = ["search-button-field", "theme-switch-button", "copybtn", "toggle-button"]
    wanted += [f"{other.stem}.html" for other in project.chapters()[1:]]
    assert not [name for name in wanted if not any(name in stop for stop in stops)]
