"""The pages by keyboard, by touch, and in both themes; `test_pages.py` runs axe."""

import re

import pytest
from browsing import SIZES, THEMES
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
    open_page(page, f"{server}/{FIRST}")
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
