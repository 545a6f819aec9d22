"""The pages by keyboard, by touch, and in both themes; `test_pages.py` runs axe."""

import re

import pytest
from browsing import FRONT, SIZES, THEMES
from colours import contrast
from test_pages import show

from cdopt_tutorial.plots.style import SERIES

pytestmark = pytest.mark.xdist_group("book")

FIRST = "notebooks/01_reinforce.html"


def open_page(page, address: str, size: str = "desk"):
    """Open a page on a screen of this size, without transitions."""
    show(page, size, "light")
    page.goto(address)
    page.add_style_tag(content="* { transition: none !important; }")


# All elements where Tab should stop, and their looks before that.
REACHABLE = """() => {
    const kinds = `a[href], button, input, select, summary, video[controls],
        [tabindex="0"]`;
    const seen = {visibilityProperty: true};
    const look = (e) => {
        const {outline, boxShadow, border, backgroundColor} = getComputedStyle(e);
        return [outline, boxShadow, border, backgroundColor].join();
    };
    window.look = look;
    window.stops = [...document.querySelectorAll(kinds)].filter((e) =>
        e.checkVisibility(seen) && !e.disabled && e.tabIndex >= 0
        && !e.closest('dialog:not([open])'));
    window.looks = stops.map(look);
    return stops.map((e) => e.outerHTML.slice(0, 160));
}"""

# The element with the focus, and whether the focus is visible.
FOCUS = """() => {
    const e = document.activeElement;
    const k = stops.indexOf(e);
    const box = e.getBoundingClientRect();
    const drawn = Number(getComputedStyle(e).opacity) > 0;
    // Of a video, a browser frames the controls.
    const framed = k < 0 || look(e) !== looks[k] || e.matches('video');
    const inside = box.bottom > 0 && box.top < innerHeight
        && box.right > 0 && box.left < innerWidth;
    return {stop: k, seen: drawn && inside && framed};
}"""


def walk(page, number: int) -> tuple[list[int], list[int]]:
    """The stops of Tab in order, and those where the focus is not visible."""
    order, unseen = [], []
    # A video has several stops.
    for _ in range(2 * number + 20):
        page.keyboard.press("Tab")
        now = page.evaluate(FOCUS)
        if order and now["stop"] in (-1, order[0]):
            break
        if now["stop"] not in order:
            order.append(now["stop"])
        if not now["seen"]:
            unseen.append(now["stop"])
    return order, unseen


@pytest.mark.parametrize("name", [FRONT, FIRST])
def test_tab_reaches_everything_and_is_seen(page, server, project, name):
    open_page(page, f"{server}/{name}")
    page.wait_for_function("MathJax.startup.promise.then(() => true)")
    stops = page.evaluate(REACHABLE)
    order, unseen = walk(page, len(stops))
    assert "#main-content" in stops[order[0]]
    assert not [stop for k, stop in enumerate(stops) if k not in order]
    assert not [stops[k] for k in unseen]
    wanted = ["search-button-field", "theme-switch-button"]
    others = (f"{chapter.stem}.html" for chapter in project.chapters())
    wanted += [other for other in others if not name.endswith(other)]
    wanted += ["copybtn", "toggle-button", "<video"] if name == FIRST else []
    assert not [each for each in wanted if not any(each in stop for stop in stops)]


def test_keys_skip_search_switch_the_theme_and_open_solutions(page, server):
    open_page(page, f"{server}/{FIRST}")
    for key in ("Tab", "Enter", "Tab"):  # the first stop skips the sidebar
        page.keyboard.press(key)
    assert page.evaluate("!!document.activeElement.closest('main')")
    seen = []
    for key in ("Enter", "Space", "Enter"):
        page.locator(".theme-switch-button").press(key)
        seen.append(page.evaluate("document.documentElement.dataset.theme"))
    assert {*THEMES} == {*seen}
    solutions = page.locator(".solution").all()
    assert solutions
    for solution in solutions:
        content = solution.locator("section").first
        assert not content.is_visible()
        for key, opened in ("Enter", True), ("Space", False):
            solution.locator(".toggle-button").press(key)
            assert content.is_visible() == opened
    button = page.locator("button.search-button-field")
    for key in ("Enter", "Space"):
        button.press(key)
        page.wait_for_selector("#pst-search-dialog[open] input:focus")
        page.keyboard.press("Escape")
        page.wait_for_selector("button.search-button-field:focus")
    page.keyboard.press("Control+k")
    page.keyboard.type("observer")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=observer")


# The text that a glossary link shows, if any, and its right edge.
MEANING = """(e) => {
    const {content, width, left} = getComputedStyle(e, '::after');
    const paragraph = e.closest('p, li, td, dd').getBoundingClientRect();
    return [content, paragraph.left + parseFloat(left) + parseFloat(width)];
}"""


@pytest.mark.parametrize("size", SIZES)
def test_words_say_what_they_mean_on_hover_and_on_focus(page, server, size):
    open_page(page, f"{server}/{FIRST}", size)
    word = page.locator("a.term", has_text="observers").first
    assert word.evaluate(MEANING)[0] == "none"
    word.hover()
    content, right = word.evaluate(MEANING)
    assert "owns environments and plays in them" in content
    assert right <= SIZES[size][0]
    page.mouse.move(0, 0)
    assert word.evaluate(MEANING)[0] == "none"
    # Only after a key does a browser show the focus.
    page.keyboard.press("Tab")
    word.focus()
    assert "owns environments" in word.evaluate(MEANING)[0]
    page.keyboard.press("Enter")
    page.wait_for_url("**/glossary.html#term-observer")


@pytest.mark.parametrize("how", ["keys", "tap"])
def test_sidebar_of_a_phone_leads_to_a_chapter(page, server, how):
    open_page(page, f"{server}/{FRONT}", "phone")
    keys = how == "keys"
    opener = page.locator("button.primary-toggle")
    sidebar = page.locator("#pst-primary-sidebar-modal")
    assert not sidebar.is_visible()
    opener.press("Enter") if keys else opener.tap()
    sidebar.wait_for(state="visible")
    # It covers its button, and a tap beside it closes it.
    page.keyboard.press("Escape") if keys else page.touchscreen.tap(385, 400)
    sidebar.wait_for(state="hidden")
    opener.press("Enter") if keys else opener.tap()
    link = sidebar.locator("a[href$='01_reinforce.html']")
    link.press("Enter") if keys else link.tap()
    page.wait_for_url(f"**/{FIRST}")


# The colours of figures' text and of their backgrounds.
INKS = """() => {
    const clear = 'rgba(0, 0, 0, 0)';
    const below = (e) => getComputedStyle(e).backgroundColor;
    const ground = (e) => below(e) === clear ? ground(e.parentElement) : below(e);
    return [...document.querySelectorAll('figure.tutorial-output svg')]
        .map((svg) => [getComputedStyle(svg).color, ground(svg)]);
}"""


def test_figures_stand_out_on_the_page(page, server):
    open_page(page, f"{server}/{FIRST}")
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        page.wait_for_selector(f"html[data-theme={theme}]")
        found = page.evaluate(INKS)
        assert found
        for ink, ground in {tuple(map(rgb, pair)) for pair in found}:
            assert contrast(ink, ground) >= 4.5
            assert all(contrast(look.color, ground) >= 3 for look in SERIES)


def rgb(computed: str) -> tuple[float, ...]:
    """A browser's colour as matplotlib has it."""
    return tuple(int(part) / 255 for part in re.findall(r"\d+", computed)[:3])
