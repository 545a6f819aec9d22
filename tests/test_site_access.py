"""The pages by keyboard, by touch, and in both themes; `test_pages.py` runs axe."""

import re

import pytest
from browsing import THEMES
from colours import contrast
from test_pages import show

from cdopt_tutorial.plots.style import SERIES

pytestmark = pytest.mark.xdist_group("book")


def open_page(page, server):
    """Open a chapter, without transitions."""
    show(page, "desk", "light")
    page.goto(f"{server}/notebooks/01_reinforce.html")
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
    open_page(page, server)
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


# The colours of figures' text and of their backgrounds.
INKS = """() => {
    const clear = 'rgba(0, 0, 0, 0)';
    const below = (e) => getComputedStyle(e).backgroundColor;
    const ground = (e) => below(e) === clear ? ground(e.parentElement) : below(e);
    return [...document.querySelectorAll('figure.tutorial-output svg')]
        .map((svg) => [getComputedStyle(svg).color, ground(svg)]);
}"""


def test_figures_stand_out_on_the_page(page, server):
    open_page(page, server)
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
