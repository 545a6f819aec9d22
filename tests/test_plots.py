"""The figures: what they show, and that everyone can read them."""

import itertools

import numpy as np
import pytest
from colours import contrast, linear
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from cdopt_tutorial import plots
from cdopt_tutorial.plots import style
from cdopt_tutorial.probes.trace import Call, Span

WHITE, DARK, THEME_DARK = "#ffffff", "#121212", "#14181e"

# Machado, Oliveira, Fernandes 2009: what people without one kind of cone see.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Björn Ottosson's space, in which distances are alike to the eye."""
    to_lms = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ np.clip(rgb, 0, 1))


def texts(fig) -> list[str]:
    """All that is written in a figure."""
    FigureCanvasAgg(fig).draw()
    found = []
    for ax in fig.axes:
        found += [t.get_text() for t in ax.texts]
        found += [t.get_text() for t in ax.get_xticklabels() + ax.get_yticklabels()]
        found += [ax.get_xlabel(), ax.get_ylabel()]
    return found + [t.get_text() for legend in fig.legends for t in legend.get_texts()]


def assert_apart(boxes) -> None:
    for one, two in itertools.combinations(boxes, 2):
        assert not one.padded(-0.5).overlaps(two)


@pytest.mark.parametrize("look", style.SERIES, ids=lambda look: look.color)
def test_colours_stand_out_on_the_page(look):
    assert all(contrast(look.color, page) >= 3 for page in (WHITE, DARK, THEME_DARK))


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_differ_to_everyone(blindness):
    seen = [oklab(BLINDNESS[blindness] @ linear(s.color)) for s in style.SERIES]
    for one, two in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - two) >= 0.1


def test_colour_is_never_the_only_difference():
    pairs = itertools.combinations(style.SERIES, 2)
    assert all(a.marker != b.marker for a, b in pairs)
    together = ["agent", "observer0", "observer1", "observer2"]
    assert len({style.look(name).color for name in together}) == 4
    together = ["master", "trainer0", "trainer1", "trainer2", "ps"]
    assert len({style.look(name).color for name in together}) == 5


def test_roles_are_known_by_name():
    assert style.look("observer3") == style.look("observer0")
    mixed = ["ps", "trainer10", "trainer2", "master", "ps"]
    assert style.in_order(mixed) == ["master", "trainer2", "trainer10", "ps"]
    with pytest.raises(ValueError, match="'boss'.*agent"):
        style.look("boss")


def call(caller, callee, method, sent, took=400):
    started, ended, received = sent + 100, sent + took - 100, sent + took
    return Call(caller, callee, method, sent, started, ended, received)


def episode(steps: int):
    """Calls of one agent and two observers, in ns from an arbitrary zero."""
    zero = 7_000_000_000
    calls = []
    for k in range(2):
        start = zero + 50 * k
        calls.append(call("agent", f"observer{k}", "run_episode", start, 1000 * steps))
        for n in range(steps):
            at = start + 150 + 900 * n
            calls.append(call(f"observer{k}", "agent", "select_action", at))
            calls.append(call(f"observer{k}", "agent", "report_reward", at + 450))
    return calls


@pytest.mark.parametrize("steps", [1, 50])
def test_timeline_has_a_lane_per_worker_and_a_row_per_method(steps):
    fig = plots.timeline(episode(steps))
    (ax,) = fig.axes
    labels = [t.get_text() for t in ax.get_yticklabels()]
    assert sorted(labels[:3]) == ["agent", "observer0", "observer1"]
    methods = ["report_reward", "run_episode", "run_episode", "select_action"]
    assert sorted(labels[3:]) == methods and "time in µs" in texts(fig)
    bottom, top = ax.get_ylim()
    for lane in ax.patches:  # each of them is whole
        assert top <= lane.get_y() < lane.get_y() + lane.get_height() <= bottom
    assert_apart(t.get_window_extent() for t in ax.get_yticklabels())


def test_timeline_draws_every_call_where_it_was():
    fig = plots.timeline(episode(2))
    (ax,) = fig.axes
    bars = [p.get_extents() for c in ax.collections for p in c.get_paths()]
    spans = {(round(b.x0, 3), round(b.x1, 3)) for b in bars}
    zero = min(c.sent for c in episode(2))
    for c in episode(2):
        for begin, end in ((c.started, c.ended), (c.sent, c.received)):
            assert ((begin - zero) / 1e3, (end - zero) / 1e3) in spans
        assert ((c.sent - zero) / 1e3, (c.started - zero) / 1e3) in spans
        assert ((c.ended - zero) / 1e3, (c.received - zero) / 1e3) in spans


def test_timeline_of_concurrent_callers_does_not_overlap():
    calls = [call(f"observer{k}", "agent", "select_action", 0) for k in range(3)]
    (ax,) = plots.timeline(calls).axes
    bars = [p for c in ax.collections for p in c.get_paths()]
    boxes = [p.get_extents() for p in bars if p.get_extents().height > 0.2]
    work = [b.padded(-0.001) for b in boxes if np.isclose(b.width, 0.2)]
    assert len(work) == 3
    assert not any(a.overlaps(b) for a, b in itertools.combinations(work, 2))


@pytest.mark.parametrize(
    ("caller", "callee"), [("agent", "observer0"), ("observer0", "agent")]
)
def test_timeline_arrows_run_between_the_sides_that_face_each_other(caller, callee):
    (ax,) = plots.timeline([call(caller, callee, "run_episode", 0)]).axes
    lanes = dict(zip(("agent", "observer0"), ax.patches, strict=True))
    top, low = lanes[caller].get_y(), lanes[caller].get_y() + lanes[caller].get_height()
    bar = ax.collections[0].get_paths()[0].get_extents()
    down = caller == "agent"
    there = (0.1, bar.y0 if down else bar.y1)
    back = (0.4, low if down else top)
    heads = {x.get_marker(): [*map(tuple, x.get_xydata())] for x in ax.lines}
    assert heads == {"v": [there if down else back], "^": [back if down else there]}
    request, response = ax.collections[1].get_paths()
    assert [*map(tuple, request.vertices)] == [(0.0, back[1]), there]
    assert [*map(tuple, response.vertices)] == [(0.3, there[1]), back]


def test_timeline_draws_a_worker_s_own_work_without_messages():
    own = call("ps", "ps", "backward", 0)
    (ax,) = plots.timeline([call("agent", "ps", "step", 0)]).axes
    (alone,) = plots.timeline([own]).axes
    assert sum(len(c.get_paths()) for c in ax.collections) == 1 + 2 + 1
    assert sum(len(c.get_paths()) for c in alone.collections) == 1
    assert not any(len(line.get_xdata()) for line in alone.lines)


def test_timeline_begins_where_a_worker_s_own_work_is_first():
    work = Span("ps", "backward", 500, 900).as_call()
    calls = [call("agent", "ps", "step", 1000), work]
    (ax,) = plots.timeline(calls).axes
    bars = [p.get_extents() for c in ax.collections for p in c.get_paths()]
    assert min(bar.x0 for bar in bars) == 0
    numbers = plots.turned(calls)[1]["calls"]
    assert numbers[1] == ["ps", "ps", "backward", 0, 0, 0.4, 0.4, 0]


def test_timeline_draws_what_touches_its_window_and_heads_where_there_is_room():
    calls = episode(50)
    (whole,) = plots.timeline(calls).axes
    (part,) = plots.timeline(calls, window=(20, 22)).axes
    assert not whole.lines and part.lines
    zero = min(c.sent for c in calls)
    near = [c for c in calls if c.received - zero >= 20e3 and c.sent - zero <= 22e3]
    wanted = {((c.started - zero) / 1e3, (c.ended - zero) / 1e3) for c in near}
    bars = [p.get_extents() for c in part.collections for p in c.get_paths()]
    drawn = {(round(b.x0, 3), round(b.x1, 3)) for b in bars if 0.1 < b.height < 0.95}
    assert 2 < len(wanted) < len(calls) and wanted <= drawn
    assert len(part.collections) < len(whole.collections) / 5


def test_timeline_says_whose_colour_is_whose():
    assert not plots.timeline(episode(1), arrows=False).axes[0].lines
    fig = plots.timeline(episode(1))
    *named, _ = fig.legends[0].legend_handles
    shown = {patch.get_label(): to_rgb(patch.get_facecolor()) for patch in named}
    callers = "agent", "observer0", "observer1"
    assert shown == {name: to_rgb(style.look(name).color) for name in callers}


def test_timeline_has_its_window_and_a_unit_that_fits():
    calls = [call("agent", "observer0", "run_episode", 0, 5_000_000)]
    fig = plots.timeline(calls, window=(1, 2))
    assert fig.axes[0].get_xlim() == (1, 2) and "time in ms" in texts(fig)
    with pytest.raises(ValueError, match="no calls"):
        plots.timeline([])


def test_curves_are_the_median_in_a_band_from_worst_to_best():
    seeds = [(np.arange(1, 11), np.arange(1, 11) * k) for k in (1, 2, 6)]
    fig = plots.learning_curves({"a": seeds}, xlabel="x", ylabel="y", threshold=9)
    (ax,) = fig.axes
    x, y = ax.lines[0].get_data()
    np.testing.assert_allclose(y, 2 * x)
    band = ax.collections[0].get_paths()[0].vertices
    for edge in (1, 6):
        np.testing.assert_allclose(band[np.isclose(band[:, 0], 10)].max(0)[1], 60)
        assert np.isclose(band[:, 1], edge * 10).any()
    assert {"a", "x", "y", "9"} <= set(texts(fig))


def test_curve_of_a_run_that_stopped_keeps_its_last_value():
    seeds = [([0, 10], [0, 10]), ([0, 20], [0, 20]), ([0, 5], [0, 50])]
    fig = plots.learning_curves({"a": seeds}, xlabel="x", ylabel="y")
    x, y = fig.axes[0].lines[0].get_data()
    assert (x[0], x[-1]) == (0, 20)
    assert y[-1] == 20  # the median of 10, 20 and 50
    ends = fig.axes[0].lines[1].get_xydata()
    assert sorted(map(tuple, ends)) == [(5, 50), (10, 10), (20, 20)]


def test_curves_are_straight_between_their_points_on_the_axes_that_are_seen():
    curves, axes = {"a": [([1, 1000], [1e-4, 2])]}, {"xscale": "log", "yscale": "log"}
    (ax,) = plots.learning_curves(curves, **axes).axes
    assert [ax.get_xscale(), ax.get_yscale()] == ["log", "log"]
    assert ax.lines[0].get_xydata().tolist() == [[1, 1e-4], [1000, 2]]


LONG = [
    "LSTM, free, Adam at 1e-3",
    "LSTM, each gate on the Stiefel manifold",
    "RNN, orthogonal start only",
    "RNN, Stiefel, penalty 0.1",
    "RNN, by torch's parametrization of orthogonal matrices, exponential",
    "GRU",
    "RNN, free, with gradient clipping at 1.0",
    "LSTM, stacked as in cdopt's LSTM_cdopt",
]


@pytest.mark.parametrize("number", [1, 4, 8])
def test_a_legend_of_long_names_is_whole(number):
    curves = {name: [([0, 1], [k, 9])] for k, name in enumerate(LONG[:number])}
    fig = plots.learning_curves(curves, xlabel="x", ylabel="y")
    FigureCanvasAgg(fig).draw()
    (ax,), (legend,) = fig.axes, fig.legends
    found = legend.get_texts()
    assert [" ".join(t.get_text().split()) for t in found] == LONG[:number]
    boxes = [t.get_window_extent() for t in found]
    assert_apart(boxes)
    frame = legend.get_window_extent()
    assert fig.bbox.x0 <= frame.x0 and frame.x1 <= fig.bbox.x1
    assert frame.y1 <= fig.bbox.y1 and frame.y0 >= ax.get_window_extent().y1
    # However many rows the legend has, the curves have the same room.
    assert ax.get_window_extent().height == pytest.approx(2.9 * fig.dpi, rel=0.05)
    assert ax.get_window_extent().width > 0.8 * style.WIDTH * fig.dpi


# The figures that show methods of several chapters.
TOGETHER = [
    ("dissolving, SGD", "dissolving, Adam", "dissolving, L-BFGS", "projection",
     "geoopt", "cayley", "householder", "matrix_exp"),
    ("plain", "fused", "cdopt.nn", "geoopt", "cayley", "householder", "matrix_exp"),
    ("RNN", "Stiefel RNN", "LSTM", "LSTM, stacked", "LSTM, per gate"),
    ("free", "orthogonal start", "Stiefel", "torch's orthogonal", "LSTM",
     "penalty alone"),
]  # fmt: skip


@pytest.mark.parametrize("names", TOGETHER)
def test_a_method_looks_the_same_in_every_figure_and_like_no_other_there(names):
    found = style.looks(names)
    assert len({look.marker for look in found.values()}) == len(names)
    again = style.looks((*names[::-1], "something else"))
    other = again.pop("something else")
    assert again == found and other not in again.values()
    curves = {name: [([0, 1], [0, 1])] for name in names}
    (ax,) = plots.learning_curves(curves, xlabel="x", ylabel="y").axes
    drawn = [line.get_color() for line in ax.lines[::2]]
    assert drawn == [found[name].color for name in names]


AXIS = np.linspace(-2, 2, 81)
BOWL = AXIS[None, :] ** 2 + 4 * AXIS[:, None] ** 2
CIRCLE = np.stack([np.cos(np.linspace(0, 6.3, 99)), np.sin(np.linspace(0, 6.3, 99))], 1)
PATHS = {
    "from the left": [(-1.5, 0.5), (0, 0.5), (0, 0.0)],
    "from the right": [(1.5, -1), (0.25, 0)],
}


def landscape(titles, paths=PATHS):
    return plots.landscape(
        AXIS, {title: (BOWL, paths) for title in titles},
        curve=CIRCLE, curve_label="the circle", target=(0, 1),
        target_label="minimum on the circle",
    )  # fmt: skip


@pytest.mark.parametrize("number", [2, 4])
def test_landscape_shows_all_in_equal_squares_and_nothing_overlaps(number):
    titles = [f"penalty only, β = {k}" for k in range(number)]
    fig = landscape(titles)
    axes = fig.axes
    assert [ax.get_title() for ax in axes] == titles
    FigureCanvasAgg(fig).draw()
    words = list(fig.legends[0].get_texts())
    found = [word.get_text() for word in words]
    assert found == [*PATHS, "start", "the circle", "minimum on the circle"]
    for ax in axes:
        labels = (ax.xaxis.label, ax.yaxis.label, ax.title)
        words += [t for t in labels if t.get_text()]
    panels = [ax.get_window_extent() for ax in axes]
    boxes = [word.get_window_extent() for word in words] + panels
    assert_apart(boxes)
    page = fig.bbox.padded(1)
    assert all(page.contains(*b.min) and page.contains(*b.max) for b in boxes)
    assert fig.get_figwidth() <= style.WIDTH
    assert len({round(b.x0) for b in panels}) == 2
    for box in panels:
        assert box.width == pytest.approx(box.height, rel=0.01)
        assert box.width == pytest.approx(panels[0].width, rel=0.01)
        assert box.width > 2.2 * fig.dpi


def test_landscape_draws_paths_circle_and_star_where_they_are():
    fig = landscape(["a", "b"])
    for ax in fig.axes:
        lines = [line.get_xydata() for line in ax.lines]
        for expected in (CIRCLE, [(0, 1)], *PATHS.values()):
            assert any(np.array_equal(line, expected) for line in lines)
        for path in PATHS.values():  # a ring at the start, a mark at the end only
            assert any(np.array_equal(line, path[:1]) for line in lines)
            (whole,) = (x for x in ax.lines if np.array_equal(x.get_xydata(), path))
            assert whole.get_markevery() == [-1] and whole.get_marker() != "None"
    both = [[(x.get_color(), x.get_label()) for x in ax.lines] for ax in fig.axes]
    assert both[0] == both[1]
    assert len({color for color, label in both[0] if label in PATHS}) == len(PATHS)


def test_arrows_lead_from_points_to_their_images():
    points = np.array([[0.5, 0.0], [0.0, 2.0]])
    groups = {"in": (points[:1], points[:1] * 2), "out": (points[1:], points[1:] / 2)}
    fig = plots.arrows(groups, curve=CIRCLE, curve_label="circle")
    (ax,) = fig.axes
    for quiver, (start, end) in zip(ax.collections, groups.values(), strict=True):
        np.testing.assert_allclose(quiver.XY, start)
        np.testing.assert_allclose(np.stack([quiver.U, quiver.V], 1), end - start)
    assert {"in", "out", "circle"} <= set(texts(fig))


def test_landscape_contours_are_where_the_function_has_their_level():
    ax, _ = landscape(["a", "b"]).axes
    filled, lines = ax.collections
    for level, path in zip(lines.levels, lines.get_paths(), strict=True):
        drawn = path.codes[1:] == path.LINETO
        x, y = (path.vertices[1:] + path.vertices[:-1])[drawn].T / 2
        np.testing.assert_allclose(x**2 + 4 * y**2, level, atol=0.06)
    assert len(lines.levels) >= 8
    assert sum(len(p.vertices) for p in filled.get_paths()) < 3000


def test_landscape_keeps_its_axes_where_a_path_runs_away():
    path = [(0, 0), (1, 1), (-1e300, 1), (np.inf, np.nan)]
    fig = landscape(["a", "b"], {"p": path})
    FigureCanvasAgg(fig).draw()
    assert fig.axes[0].get_xlim() == fig.axes[0].get_ylim() == (-2, 2)
    assert np.isfinite(fig.get_tightbbox().bounds).all()


def test_ticks_are_on_the_data_where_at_most_eight_x_were():
    for number, are_few in {8: True, 9: False, 49: False}.items():
        x = [1.3 * place for place in range(1, number + 1)]
        curves = {"a": [(x, [1.0] * number)]}
        figure = plots.learning_curves(curves, xlabel="step", ylabel="loss")
        ticks = figure.axes[0].get_xticks()
        assert (list(ticks) == x) == are_few
        assert len(ticks) < 20
