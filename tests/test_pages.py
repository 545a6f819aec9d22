"""Every page in a browser: offline, without errors, and readable."""

import itertools

import pytest
from browsing import (
    FRONT,
    REVEAL,
    SIZES,
    THEMES,
    barriers,
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
    const start = (e) => e.outerHTML.slice(0, 200);
    const small = (e) => Math.min(e.clientWidth, e.clientHeight) < 99;
    const unset = (e) => !(e.querySelector('mjx-container svg')?.clientWidth > 0);
    const figures = all('figure:not([data-turn]) svg');
    return {
        follows: follows(),
        wide: document.documentElement.scrollWidth - window.innerWidth,
        unseen: [...figures.filter(small), ...all('.math').filter(unset)].map(start),
        open: all('details.guess:not([hidden])').map(start),
        figures: figures.length,
        questions: all('.guess-place').length,
        answers: all('details.guess').length,
    };
}"""

# Empty each drawing, and leave one word of code of each colour, or axe takes a minute.
THIN = """() => {
    document.querySelectorAll('svg > :not(title)').forEach((e) => e.remove());
    const seen = new Set();
    for (const word of document.querySelectorAll('.highlight span')) {
        const kind = `${word.parentElement.className}/${word.className}`;
        // Axe judges no single character.
        if (word.textContent.length < 2 || seen.has(kind))
            word.replaceWith(...word.childNodes);
        else seen.add(kind);
    }
}"""
# One page of each kind.
ASKED = [FRONT, "notebooks/06_shards.html", "book/errors.html", "book/api/data.html"]
ASKED += ["book/glossary.html", "_modules/cdopt_tutorial/equality.html"]
ASKED += ["genindex.html", "search.html", "404.html"]


# One visit for all: a page takes a second to load, but follows at once when the size of
# the window or the preferred theme changes.
@pytest.mark.parametrize("root", ["http", "file"], indirect=True)
def test_every_page_is_offline_quiet_fits_and_keeps_nobody_out(browser, site, root):
    served = root.startswith("http")
    context = new_context(browser, offline=not served)
    page, faults, visited = context.new_page(), [], chosen(site, root)
    watch(page, root, faults)
    assert {*ASKED} <= {*visited} or not served
    for number, name in enumerate(visited):
        every = served and name.startswith(("notebooks/", FRONT))
        looks = LOOKS if every else [LOOKS[number % len(LOOKS)]]
        show(page, *looks[0])
        page.goto(f"{root}/{name}", wait_until="load")
        page.evaluate(REVEAL)
        if every:  # can everything that scrolls on a phone be reached?
            rule = {"runOnly": ["scrollable-region-focusable"]}
            assert not barriers(page, rule), name
        for size, theme in looks:
            show(page, size, theme)
            seen, at = page.evaluate(LOOK, theme), (name, size, theme)
            assert seen["follows"] and seen["wide"] <= 0, at
            assert seen["unseen"] == seen["open"] == faults == [], (at, faults)
            is_chapter = name.startswith("notebooks/")
            asked = f"a chapter asks two questions, each with its answer: {at}"
            assert seen["questions"] == seen["answers"] >= 2 * is_chapter, asked
            asked = f"a chapter has a figure without `turn`, its diagram: {at}"
            assert seen["figures"] or not is_chapter, asked
        if served and name in ASKED:
            ask_axe(page, name)
    context.close()


def chosen(site, root: str) -> list[str]:
    """The pages to visit: all but the package's modules; from the disk, chapters."""
    all_of = ("notebooks/",)
    if root.startswith("http"):
        names = pages(site, root)
        all_of = tuple(n for n in names if not n.startswith("_modules/cdopt_tutorial/"))
    return [n for n in pages(site, root) if n.startswith(all_of) or n in ASKED]


def watch(page, root: str, faults: list[str]) -> None:
    """Note a page's errors, and its requests to other hosts."""

    def note(is_fault: bool, what: str) -> None:
        if is_fault:
            faults.append(what)

    page.on("pageerror", lambda error: note(True, f"error: {error}"))
    page.on("console", lambda said: note(said.type in ("error", "warning"), said.text))
    ours = root, "data:", "blob:"
    page.on("request", lambda asked: note(not asked.url.startswith(ours), asked.url))
    # Leaving a page aborts what is still loading, which is no fault.
    aborted = "net::ERR_ABORTED"
    page.on("requestfailed", lambda asked: note(asked.failure != aborted, asked.url))


def show(page, size: str, theme: str) -> None:
    """Look at this page and the next ones on this screen, preferring this theme."""
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)


def ask_axe(page, name: str) -> None:
    """Axe finds nothing on a page in both themes, which is spoilt by this."""
    page.add_style_tag(content="* { transition: none !important; }")
    page.evaluate(THIN)
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        assert page.evaluate(LOOK, theme)["follows"]
        assert not barriers(page, {}), (name, theme)
