"""The figure of which part of each weight lies where: areas, outlines, titles."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cdopt_tutorial import plots
from cdopt_tutorial.sharding.costs import Part

WHOLE = Part((8, 4), (0, 0), (8, 4))
ROWS = [Part((8, 4), (0, 0), (5, 4)), Part((8, 4), (5, 0), (3, 4))]
COLUMNS = [Part((4, 8), (0, 0), (4, 2)), Part((4, 8), (0, 2), (4, 6))]
WAYS = {
    "copies": [{"up": WHOLE}] * 2,
    "both": [{"up": a, "down": b} for a, b in zip(ROWS, COLUMNS, strict=True)],
    "stages": [{}, {"up": WHOLE, "down": COLUMNS[0]}],
}
PARTS = sum(WAYS.values(), [])


@pytest.fixture(scope="module")
def axes():
    fig = plots.ownership(WAYS)
    FigureCanvasAgg(fig).draw()
    return fig.axes


def drawn(ax) -> tuple[list, list]:
    """The outlines of an axes, and what is filled."""
    outlines = [each for each in ax.patches if not each.get_fill()]
    return outlines, [each for each in ax.patches if each.get_fill()]


def test_each_weight_has_an_outline_and_a_part_of_its_area_in_its_place(axes):
    for ax, parts in zip(axes, PARTS, strict=True):
        for outline, fill, part in zip(*drawn(ax), parts.values(), strict=True):
            assert (outline.get_height() * 8, outline.get_width() * 8) == part.shape
            area = fill.get_height() * fill.get_width() * 64
            assert area == pytest.approx(part.count)
            top = outline.get_y() + outline.get_height()
            down = (top - fill.get_y() - fill.get_height()) * 8
            right = (fill.get_x() - outline.get_x()) * 8
            assert (down, right) == pytest.approx(part.begin)


def test_weights_stand_side_by_side_with_their_names_below(axes):
    for ax, parts in zip(axes, PARTS, strict=True):
        assert [text.get_text() for text in ax.texts] == list(parts)
        outlines, _ = drawn(ax)
        ends = [each.get_x() + each.get_width() for each in outlines]
        for end, following in zip(ends, outlines[1:], strict=False):
            assert following.get_x() > end
        left, right = ax.get_xlim()
        assert all(left < each.get_x() for each in outlines)
        assert all(end < right for end in ends)


def test_ranks_have_titles_and_ways_have_names(axes):
    first, second, *rest = axes
    assert [first.get_title(), second.get_title()] == ["rank 0", "rank 1"]
    assert not any(each.get_title() for each in rest)
    names = [each.get_ylabel() for each in (first, rest[0], rest[2])]
    assert names == list(WAYS)


def test_ranks_are_not_told_by_colour_alone_and_six_are_the_most():
    fig = plots.ownership({"copies": [{"up": WHOLE}] * 6})
    filled = [each for ax in fig.axes for each in drawn(ax)[1]]
    assert len({each.get_facecolor() for each in filled}) == 6
    assert len({each.get_hatch() for each in filled}) == 6
