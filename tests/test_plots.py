"""The figures: what they draw, and that everyone can read them."""

import itertools
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb

from cdopt_tutorial import plots
from cdopt_tutorial.plots import style
from cdopt_tutorial.probes.trace import Call, Span
from cdopt_tutorial.sharding.costs import Part

PAGES = "#ffffff", "#121212", "#14181e"  # light, and two dark ones


def matrix(rows):
    return np.array(rows.split(), dtype=float).reshape(3, 3)


# Machado, Oliveira, Fernandes 2009: what people without one kind of cone see.
BLINDNESS = {
    "none": matrix("1 0 0   0 1 0   0 0 1"),
    "protanopia": matrix(".152 1.053 -.205   .115 .786 .099   -.004 -.048 1.052"),
    "deuteranopia": matrix(".367 .861 -.228   .280 .673 .047   -.012 .043 .969"),
    "tritanopia": matrix("1.256 -.077 -.179   -.078 .931 .148   .005 .691 .304"),
}
# Björn Ottosson's space, OKLab, in which distances are alike to the eye.
LMS = matrix(".4122 .5363 .0514   .2119 .6807 .1074   .0883 .2817 .6300")
LAB = matrix(".2105 .7936 -.0041   1.9780 -2.4286 .4506   .0259 .7828 -.8087")


def linear(color) -> np.ndarray:
    """The amounts of light of a colour of matplotlib's, without sRGB's curve."""
    c = np.array(to_rgb(color))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one, two) -> float:
    """The contrast ratio of WCAG 2."""
    weights = (0.2126, 0.7152, 0.0722)
    low, high = sorted(float(linear(c) @ weights) for c in (one, two))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_stand_out_and_differ_to_everyone(blindness):
    for look in style.SERIES:
        assert all(contrast(look.color, page) >= 3 for page in PAGES)
    lights = [BLINDNESS[blindness] @ linear(look.color) for look in style.SERIES]
    seen = [LAB @ np.cbrt(LMS @ np.clip(light, 0, 1)) for light in lights]
    for one, two in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - two) >= 0.1


def test_roles_are_known_by_name_and_differ_where_they_are_together():
    assert style.look("observer3") == style.look("observer0")
    mixed = ["ps", "trainer10", "trainer2", "master", "ps"]
    assert style.in_order(mixed) == ["master", "trainer2", "trainer10", "ps"]
    for role, *rest in ("observer", "agent"), ("trainer", "master", "ps"):
        together = [f"{role}{number}" for number in range(3)] + rest
        assert len({style.look(name).color for name in together}) == len(together)


def test_a_method_looks_the_same_everywhere_and_like_no_other():
    methods = set(style.METHODS.values())
    assert len({(look.color, look.marker) for look in methods}) == len(methods)
    names = ["SPEL", "dissolved", "torch's orthogonal", "spectral norm", "free"]
    *known, other = style.looks([*names, "something else"]).values()
    assert known == [style.METHODS[name] for name in names]
    assert other.color not in {look.color for look in known}


def call(caller, callee, method, sent, took=400):
    started, ended, received = sent + 100, sent + took - 100, sent + took
    return Call(caller, callee, method, sent, started, ended, received)


def episode(steps: int):
    """Calls of one agent and two observers at once, in ns from an arbitrary zero."""
    calls = []
    for k in range(2):
        start = 7_000_000_000 + 50 * k
        calls.append(call("agent", f"observer{k}", "run_episode", start, 1000 * steps))
        for n in range(steps):
            at = start + 150 + 900 * n
            calls.append(call(f"observer{k}", "agent", "select_action", at))
            calls.append(call(f"observer{k}", "agent", "report_reward", at + 450))
    return calls


AXIS = np.linspace(-2, 2, 81)
BOWL = AXIS[None, :] ** 2 + 4 * AXIS[:, None] ** 2
PATHS = {"left": [(-1.5, 0.5), (0, 0.5), (0, 0.0)], "right": [(1.5, -1), (0.25, 0)]}
POINTS = np.array([[0.5, 0.0], [0.0, 1.7]])
GROUPS = {"in": (POINTS[:1], POINTS[:1] * 2), "out": (POINTS[1:], POINTS[1:] / 2)}
LONG = [
    "LSTM, free, Adam at 1e-3", "LSTM, each gate on the Stiefel manifold", "GRU",
    "RNN, orthogonal start only", "RNN, by torch's orthogonal matrices",
]  # fmt: skip
WHOLE = Part((8, 4), (0, 0), (8, 4))
ROWS = [Part((8, 4), (0, 0), (5, 4)), Part((8, 4), (5, 0), (3, 4))]
COLUMNS = [Part((4, 8), (0, 0), (4, 2)), Part((4, 8), (0, 2), (4, 6))]
WAYS = {
    "copies": [{"up": WHOLE}] * 2,
    "both": [{"up": a, "down": b} for a, b in zip(ROWS, COLUMNS, strict=True)],
    "stages": [{}, {"up": WHOLE, "down": COLUMNS[0]}],
}


def long_names():
    curves = {name: [([0, 1], [k, 9])] for k, name in enumerate(LONG)}
    return plots.learning_curves(curves, xlabel="x", ylabel="y", threshold=5)


def diverging():
    values = {"one": [1.0, 1e9, math.inf], "other": [1.0, 0.5, 0.25]}
    curves = {name: [([1, 8, 32], y)] for name, y in values.items()}
    axes = {"yscale": "log", "ylim": (0.05, 1000)}
    return plots.learning_curves(curves, xlabel="x", ylabel="y", **axes)


def landscape():
    panels = {f"penalty, β = {k}": (BOWL, PATHS) for k in range(4)}
    return plots.landscape(AXIS, panels, target=(0, 1))


# What draws a figure, and the names in its legend.
SHOWN = ["start", "the circle", "constrained minimum"]
CALLERS = ["agent", "observer0", "observer1"]
FIGURES = {
    "long names": (long_names, LONG),
    "a curve that diverges": (diverging, ["one", "other"]),
    "landscapes": (landscape, [*PATHS, *SHOWN]),
    "arrows": (lambda: plots.arrows(GROUPS), ["in", "out", "the circle"]),
    "ownership": (lambda: plots.ownership(WAYS), []),
    "a few calls": (lambda: plots.timeline(episode(1)), [*CALLERS, "caller waits"]),
    "many calls": (lambda: plots.timeline(episode(50)), CALLERS),
}


@pytest.mark.parametrize(("draw", "names"), FIGURES.values(), ids=FIGURES)
def test_words_and_panels_are_whole_and_apart(draw, names):
    fig = draw()
    FigureCanvasAgg(fig).draw()
    words = [word for legend in fig.legends for word in legend.get_texts()]
    assert [" ".join(word.get_text().split()) for word in words] == names
    for ax in fig.axes:
        words += [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts]
        for axis, limits in (ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim()):
            low, high = sorted(limits)
            ticks = [t for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
            words += [tick.label1 for tick in ticks]
    inside = [text for ax in fig.axes for text in ax.texts]  # of their panels
    shown = [word for word in words if word.get_visible() and word.get_text()]
    boxes = [word.get_window_extent() for word in shown]
    panels = [ax.get_window_extent() for ax in fig.axes]
    around = [word.get_window_extent() for word in shown if word not in inside]
    for one, two in [
        *itertools.combinations(boxes, 2),
        *itertools.combinations(panels, 2),
        *itertools.product(around, panels),
    ]:
        assert not one.padded(-0.5).overlaps(two)
    page = fig.bbox.padded(1)
    assert all(page.contains(*b.min) and page.contains(*b.max) for b in boxes + panels)
    assert np.isfinite(fig.get_tightbbox().bounds).all()
    assert fig.get_figwidth() <= style.WIDTH


def test_curves_are_the_median_in_a_band_and_keep_the_last_value_of_a_run():
    seeds = [([0, 10], [0, 10]), ([0, 20], [0, 20]), ([0, 5], [0, 50])]
    (ax,) = plots.learning_curves({"a": seeds}, threshold=9).axes
    x, y = ax.lines[0].get_data()
    assert (*x, *y) == (0, 5, 10, 20, 0, 5, 10, 20)
    band = ax.collections[0].get_paths()[0].vertices
    assert {5, 10, 50} <= {*band[:, 1]} and band[:, 1].max() == 50
    ends = ax.lines[1].get_xydata()
    assert sorted(map(tuple, ends)) == [(5, 50), (10, 10), (20, 20)]
    assert ax.lines[-1].get_ydata() == [9, 9]


def test_paths_circle_star_and_contours_are_where_they_belong():
    for ax in landscape().axes:
        marks = {x.get_label(): x for x in ax.lines}
        np.testing.assert_allclose(np.hypot(*marks["the circle"].get_data()), 1)
        assert marks["constrained minimum"].get_xydata().tolist() == [[0, 1]]
        for name, path in PATHS.items():  # a ring at the start, a mark at the end
            assert np.array_equal(marks[name].get_xydata(), path)
            assert marks[name].get_markevery() == [-1]
            rings = [np.array_equal(x.get_xydata(), path[:1]) for x in ax.lines]
            assert sum(rings) == 1
        _, contours = ax.collections
        for level, path in zip(contours.levels, contours.get_paths(), strict=True):
            drawn = path.codes[1:] == path.LINETO
            x, y = (path.vertices[1:] + path.vertices[:-1])[drawn].T / 2
            np.testing.assert_allclose(x**2 + 4 * y**2, level, atol=0.06)


def test_arrows_lead_from_points_to_their_images():
    (ax,) = plots.arrows(GROUPS).axes
    for quiver, (start, end) in zip(ax.collections, GROUPS.values(), strict=True):
        np.testing.assert_allclose(quiver.XY, start)
        np.testing.assert_allclose(np.stack([quiver.U, quiver.V], 1), end - start)


def test_each_rank_s_part_has_its_area_in_its_place_of_a_whole_weight():
    axes = plots.ownership(WAYS).axes
    for ax, parts in zip(axes, sum(WAYS.values(), []), strict=True):
        outlines = [patch for patch in ax.patches if not patch.get_fill()]
        fills = [patch for patch in ax.patches if patch.get_fill()]
        for outline, fill, part in zip(outlines, fills, parts.values(), strict=True):
            assert (outline.get_height() * 8, outline.get_width() * 8) == part.shape
            area = fill.get_height() * fill.get_width() * 64
            assert area == pytest.approx(math.prod(part.size))
            top = outline.get_y() + outline.get_height()
            down = (top - fill.get_y() - fill.get_height()) * 8
            right = (fill.get_x() - outline.get_x()) * 8
            assert (down, right) == pytest.approx(part.begin)
        assert [text.get_text() for text in ax.texts] == list(parts)


def work(ax):
    """The bars of a timeline."""
    bars = [c for c in ax.collections if not isinstance(c, LineCollection)]
    return [path.get_extents() for c in bars for path in c.get_paths()]


def lines(ax):
    """The ends of its lines in time, to a nanosecond."""
    found = [c for c in ax.collections if isinstance(c, LineCollection)]
    segments = [segment for c in found for segment in c.get_segments()]
    return {tuple(round(1e3 * x) for x, _ in segment) for segment in segments}


def test_each_call_is_a_bar_apart_from_others_between_two_arrows():
    calls = episode(2)
    (ax,) = plots.timeline(calls).axes
    zero = min(c.sent for c in calls)
    bars = work(ax)
    drawn = sorted((round(1e3 * b.x0), round(1e3 * b.x1)) for b in bars)
    assert drawn == sorted((c.started - zero, c.ended - zero) for c in calls)
    for one, two in itertools.combinations(bars, 2):
        assert not one.padded(-0.001).overlaps(two)
    pairs = ("sent", "started"), ("ended", "received"), ("sent", "received")
    ends = {tuple(getattr(c, t) - zero for t in pair) for c in calls for pair in pairs}
    assert lines(ax) == ends
    assert {label.get_text() for label in ax.get_yticklabels()} == {
        *CALLERS, "report_reward", "run_episode", "select_action",
    }  # fmt: skip


@pytest.mark.parametrize("down", [True, False])
def test_arrows_run_between_the_sides_that_face_each_other(down):
    workers = ("agent", "observer0")[:: 1 if down else -1]
    (ax,) = plots.timeline([call(*workers, "run_episode", 0)]).axes
    (bar,), lane = work(ax), ax.patches[0 if down else 1]
    callee = bar.y0 if down else bar.y1
    caller = lane.get_y() + (lane.get_height() if down else 0)
    request, response = (c.tolist() for c in ax.collections[1].get_segments())
    assert request == [[0.0, caller], [0.1, callee]]
    assert response == [[0.3, callee], [0.4, caller]]


def test_a_worker_s_own_work_sends_nothing_and_may_come_first():
    own = Span("ps", "backward", 500, 900).as_call()
    calls = [call("agent", "ps", "step", 1000), own]
    (ax,) = plots.timeline(calls).axes
    assert min(bar.x0 for bar in work(ax)) == 0
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["agent", "ps", "backward", "step"]
    assert lines(ax) == {(500, 600), (800, 900), (500, 900)}
    assert len([c for x in ax.lines for c in x.get_xdata()]) == 2
    numbers = plots.turned(calls)[1]["calls"]
    assert numbers[1] == ["ps", "ps", "backward", 0, 0, 0.4, 0.4, 0]


def test_a_window_shows_what_touches_it_and_arrows_where_there_is_room():
    calls = episode(50)
    (whole,) = plots.timeline(calls).axes
    (part,) = plots.timeline(calls, window=(20, 22)).axes
    assert not whole.lines and part.lines and part.get_xlim() == (20, 22)
    zero = min(c.sent for c in calls)
    near = [c for c in calls if c.received - zero >= 20e3 and c.sent - zero <= 22e3]
    assert 2 < len(near) == len(work(part)) < len(calls) / 5


def test_a_timeline_of_no_calls_is_refused():
    with pytest.raises(ValueError, match="no calls to draw"):
        plots.timeline([])
