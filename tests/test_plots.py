"""The figures: what they hold, and that everyone can read them."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from colours import contrast, linear
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from cdopt_tutorial import plots
from cdopt_tutorial.plots import style

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
        if ax.get_legend():
            found += [t.get_text() for t in ax.get_legend().get_texts()]
    return found


@pytest.mark.parametrize("page", [WHITE, DARK, THEME_DARK])
@pytest.mark.parametrize("look", style.SERIES, ids=lambda look: look.color)
def test_colours_stand_out_on_the_page(look, page):
    assert contrast(look.color, page) >= 3


def test_contrast_knows_black_on_white():
    assert contrast("black", "white") == pytest.approx(21)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_differ_to_everyone(blindness):
    seen = [oklab(BLINDNESS[blindness] @ linear(s.color)) for s in style.SERIES]
    for one, two in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - two) >= 0.1


def test_red_and_green_of_one_lightness_would_be_caught():
    seen = [
        oklab(np.array(BLINDNESS["deuteranopia"]) @ linear(c))
        for c in ("#a05050", "#607030")
    ]
    assert np.linalg.norm(seen[0] - seen[1]) < 0.1


def test_colour_is_never_the_only_difference():
    pairs = itertools.combinations(style.SERIES, 2)
    assert all(a.marker != b.marker and a.hatch != b.hatch for a, b in pairs)
    together = ["agent", "observer0", "observer1", "observer2"]
    assert len({style.look(name).color for name in together}) == 4
    together = ["master", "trainer0", "trainer1", "trainer2", "ps"]
    assert len({style.look(name).color for name in together}) == 5


def test_roles_are_known_by_name():
    assert style.look("observer3") == style.look("observer0")
    assert style.in_order(["ps", "trainer10", "trainer2", "master", "ps"]) == [
        "master",
        "trainer2",
        "trainer10",
        "ps",
    ]
    with pytest.raises(ValueError, match="'boss'.*agent"):
        style.look("boss")
    with pytest.raises(ValueError, match="'huge'.*wide"):
        style.new_figure("huge")


SYSTEMS = {
    "one observer": (
        {"agent": ["the policy"], "observer0": ["an environment"]},
        [("agent", "observer0", "run"), ("observer0", "agent", "select_action")],
    ),
    "three observers": (
        {"agent": ["the policy", "the optimizer", "rewards"]}
        | {f"observer{k}": ["an environment"] for k in range(3)},
        [("agent", f"observer{k}", "run") for k in range(3)]
        + [(f"observer{k}", "agent", "select_action") for k in range(3)],
    ),
    "parameter server": (
        {"trainer0": ["decoder"], "trainer1": ["decoder"], "ps": ["table"]},
        [("trainer0", "ps", "lookup"), ("ps", "trainer1", "rows")],
    ),
    "hybrid": (
        {"master": ["RRef"], "trainer0": ["DDP"], "trainer1": ["DDP"], "ps": ["bag"]},
        [("master", "ps", "create the table"), ("master", "trainer0", "train")]
        + [("master", "trainer1", "train"), ("trainer0", "ps", "lookup")]
        + [("ps", "trainer0", "rows")],
    ),
}


@pytest.mark.parametrize("size", ["wide", "small"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_diagram_shows_all_and_nothing_overlaps(system, size):
    workers, messages = SYSTEMS[system]
    fig = plots.process_diagram(workers, messages, size=size)
    found = texts(fig)
    for name, owns in workers.items():
        assert name in found and set(owns) <= set(found)
    labels = [label for _, _, label in messages]
    assert all(found.count(label) == labels.count(label) for label in labels)
    (ax,) = fig.axes
    renderer = fig.canvas.get_renderer()
    arrows = [p for p in ax.patches if isinstance(p, FancyArrowPatch)]
    boxes = [p for p in ax.patches if isinstance(p, FancyBboxPatch)]
    assert len(arrows) == len(messages) and len(boxes) == 2 * len(workers)
    words = [t.get_window_extent(renderer).padded(-0.5) for t in ax.texts]
    for one, two in itertools.combinations(words, 2):
        assert not one.overlaps(two)
    frames = {b.get_window_extent(renderer).bounds for b in boxes}
    assert len(frames) == len(workers)
    page = fig.bbox
    assert all(page.x0 <= w.x0 and w.x1 <= page.x1 for w in words)
    for arrow in arrows:
        tail, head = arrow.get_path().vertices[[0, -1]]
        assert not any(
            w.contains(*ax.transData.transform((tail + head) / 2)) for w in words
        )


def test_diagram_numbers_messages_by_label():
    fig = plots.process_diagram(*SYSTEMS["three observers"])
    found = texts(fig)
    assert (found.count("1"), found.count("2"), found.count("3")) == (3, 3, 0)


@pytest.mark.parametrize("size", style.SIZES)
@pytest.mark.parametrize("both", [True, False])
def test_diagram_joins_neighbours_in_a_column(both, size):
    workers = {"trainer0": ["a dense layer"], "trainer1": [], "ps": ["a table"]}
    there = [("trainer0", "trainer1", "all-reduce")]
    back = [("trainer1", "trainer0", "all-reduce")] if both else []
    fig = plots.process_diagram(
        workers, [*there, *back, ("trainer1", "ps", "look up")], size=size
    )
    assert texts(fig).count("all-reduce") == texts(fig).count("1") == 1
    (ax,) = fig.axes
    upright, level = (p for p in ax.patches if isinstance(p, FancyArrowPatch))
    arrow = upright.get_path().get_extents()
    assert arrow.height > 2 * arrow.width  # a head is as wide as that
    assert level.get_path().get_extents().width > arrow.width
    boxes = [p for p in ax.patches if isinstance(p, FancyBboxPatch)]
    trainers = {(b.get_y(), b.get_height()) for b in boxes if b.get_x() < arrow.x0}
    (low, height), (above, _) = sorted(trainers)
    assert low + height < arrow.y0 < arrow.y1 < above
    assert upright.get_arrowstyle().arrow == ("<|-|>" if both else "-|>")


def test_diagram_refuses_what_it_cannot_draw():
    workers = {"agent": [], "observer0": [], "observer1": []}
    with pytest.raises(ValueError, match="'ps', not one of agent"):
        plots.process_diagram(workers, [("agent", "ps", "hello")])
    three = {**workers, "observer2": []}
    with pytest.raises(ValueError, match="not next to each other"):
        plots.process_diagram(three, [("observer0", "observer2", "hello")])
    with pytest.raises(ValueError, match="shorten"):
        plots.process_diagram(workers, [("agent", "observer0", "long " * 30)])


def call(caller, callee, method, sent, took=400):
    times = {"started": sent + 100, "ended": sent + took - 100, "received": sent + took}
    return SimpleNamespace(
        caller=caller, callee=callee, method=method, sent=sent, **times,
        request_bytes=1, response_bytes=1,
    )  # fmt: skip


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
    calls = episode(steps)
    fig = plots.timeline(calls)
    labels = [t.get_text() for t in fig.axes[0].get_yticklabels()]
    assert sorted(labels[:3]) == ["agent", "observer0", "observer1"]
    assert sorted(labels[3:]) == [
        "report_reward",
        "run_episode",
        "run_episode",
        "select_action",
    ]
    assert f"time in {'µs'}" in texts(fig)
    FigureCanvasAgg(fig).draw()
    renderer = fig.canvas.get_renderer()
    words = [
        t.get_window_extent(renderer).padded(-0.5)
        for t in fig.axes[0].get_yticklabels()
    ]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(words, 2))


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
    work = [b for b in boxes if np.isclose(b.width, 0.2)]
    assert len(work) == 3
    assert not any(
        a.padded(-0.001).overlaps(b) for a, b in itertools.combinations(work, 2)
    )


def test_timeline_window_and_unit():
    calls = [call("agent", "observer0", "run_episode", 0, 5_000_000)]
    fig = plots.timeline(calls, window=(1, 2))
    assert fig.axes[0].get_xlim() == (1, 2)
    assert "time in ms" in texts(fig)
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


def test_curves_take_a_logarithmic_x_and_refuse_bad_seeds():
    curves = {"a": [([1, 1000], [1, 2])], "b": [([10, 100], [1, 2])]}
    fig = plots.learning_curves(curves, xlabel="x", ylabel="y", log_x=True)
    assert fig.axes[0].get_xscale() == "log"
    for bad in ([], [([1, 2], [1])], [([], [])]):
        with pytest.raises(ValueError, match="the curve 'a'"):
            plots.learning_curves({"a": bad}, xlabel="x", ylabel="y")


def test_curves_take_a_logarithmic_y():
    """Between its points a curve runs straight on the logarithmic axis."""
    seeds = [([0, 10], [1e-4, k]) for k in (1, 2, 100)]
    fig = plots.learning_curves(
        {"a": seeds}, xlabel="x", ylabel="y", log_y=True, threshold=0.5
    )
    (ax,) = fig.axes
    assert ax.get_yscale() == "log"
    x, y = ax.lines[0].get_data()
    np.testing.assert_allclose(y, 1e-4 * (2 / 1e-4) ** (x / 10))
    linear = plots.learning_curves({"a": seeds}, xlabel="x", ylabel="y")
    np.testing.assert_allclose(
        linear.axes[0].lines[0].get_ydata(), 1e-4 + (2 - 1e-4) * x / 10
    )


@pytest.mark.parametrize("bad", [0, -1])
def test_curves_refuse_what_a_logarithmic_y_cannot_show(bad):
    shown = {"xlabel": "x", "ylabel": "y", "log_y": True}
    with pytest.raises(ValueError, match=f"'a' has {bad}, .*logarithmic"):
        plots.learning_curves({"a": [([1, 2], [1, bad])]}, **shown)
    with pytest.raises(ValueError, match=f"threshold is {bad}, .*logarithmic"):
        plots.learning_curves({"a": [([1, 2], [1, 1])]}, threshold=bad, **shown)


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


@pytest.mark.parametrize("size", ["wide", "small"])
@pytest.mark.parametrize("number", [1, 4, 5, 8])
def test_a_legend_of_long_names_is_whole(size, number):
    curves = {name: [([0, 1], [k, 9])] for k, name in enumerate(LONG[:number])}
    fig = plots.learning_curves(curves, xlabel="x", ylabel="y", size=size)
    FigureCanvasAgg(fig).draw()
    (ax,) = fig.axes
    found = ax.get_legend().get_texts()
    assert [" ".join(t.get_text().split()) for t in found] == LONG[:number]
    boxes = [t.get_window_extent() for t in found]
    for one, two in itertools.combinations(boxes, 2):
        assert not one.padded(-0.5).overlaps(two)
    frame = ax.get_legend().get_window_extent()
    assert fig.bbox.x0 <= frame.x0 and frame.x1 <= fig.bbox.x1
    assert frame.y1 <= fig.bbox.y1 and frame.y0 >= ax.get_window_extent().y1
    width, height = style.SIZES[size]
    assert ax.get_window_extent().height > 0.65 * height * fig.dpi
    assert ax.get_window_extent().width > 0.8 * width * fig.dpi


def test_a_legend_of_short_names_leaves_the_figure_its_size():
    curves = {name: [([0, 1], [0, 1])] for name in "abcd"}
    for size, inches in style.SIZES.items():
        fig = plots.learning_curves(curves, xlabel="x", ylabel="y", size=size)
        assert tuple(fig.get_size_inches()) == inches


def test_no_two_of_eight_curves_look_alike():
    curves = {name: [([0, 1], [0, 1])] for name in "abcdefgh"}
    (ax,) = plots.learning_curves(curves, xlabel="x", ylabel="y").axes
    lines = [line for line in ax.lines if len(line.get_label()) == 1]
    looks = {(line.get_color(), line.get_marker()) for line in lines}
    assert len(looks) == len(lines) == 8
    assert len({line.get_marker() for line in lines}) == 8


def test_bars_say_their_values_and_ratios():
    rows = [
        {"name": "per-step", "value": 812.4, "ratio": 1.0},
        {"name": "local-policy", "value": 142000.0, "ratio": 174.8},
        {"name": "tiny", "value": 0.01234},
    ]
    fig = plots.bars(rows, xlabel="steps per second", log=True)
    found = texts(fig)
    for word in ("812  (×1)", "142,000  (×175)", "0.0123", "per-step", "tiny"):
        assert word in found
    assert [bar.get_width() for bar in fig.axes[0].patches] == [
        row["value"] for row in rows
    ]
    first, *_, last = fig.axes[0].patches
    height = fig.axes[0].transData.transform
    assert height((0, first.get_y()))[1] > height((0, last.get_y()))[1]


def test_bars_refuse_what_they_cannot_show():
    with pytest.raises(ValueError, match="no rows"):
        plots.bars([], xlabel="x")
    with pytest.raises(ValueError, match="logarithmic"):
        plots.bars([{"name": "a", "value": 0}], xlabel="x", log=True)


AXIS = np.linspace(-2, 2, 81)
BOWL = AXIS[None, :] ** 2 + 4 * AXIS[:, None] ** 2
CIRCLE = np.stack([np.cos(np.linspace(0, 6.3, 99)), np.sin(np.linspace(0, 6.3, 99))], 1)
PATHS = {
    "from the left": [(-1.5, 0.5), (0, 0.5), (0, 0.0)],
    "from the right": [(1.5, -1), (0.25, 0)],
}


def landscape(titles, size="wide", **more):
    return plots.landscape(
        AXIS, AXIS, {title: plots.Panel(BOWL, PATHS) for title in titles},
        curve=CIRCLE, curve_label="the circle", target=(0, 1),
        target_label="minimum on the circle", size=size, **more,
    )  # fmt: skip


def lines_of(ax) -> list[np.ndarray]:
    return [line.get_xydata() for line in ax.lines]


@pytest.mark.parametrize("size", ["wide", "small"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_landscape_shows_all_and_nothing_overlaps(number, size):
    titles = [f"penalty only, β = {k}" for k in range(number)]
    fig = landscape(titles, size)
    assert len(fig.axes) == number
    FigureCanvasAgg(fig).draw()
    (legend,) = fig.legends
    words = list(legend.get_texts())
    for ax in fig.axes:
        labels = (ax.xaxis.label, ax.yaxis.label, ax.title)
        words += [t for t in labels if t.get_text()]
    found = [word.get_text() for word in words]
    assert {*titles, *PATHS, "start", "the circle", "minimum on the circle"} <= {*found}
    boxes = [word.get_window_extent() for word in words]
    boxes += [ax.get_window_extent() for ax in fig.axes]
    for one, two in itertools.combinations(boxes, 2):
        assert not one.padded(-0.5).overlaps(two)
    page = fig.bbox.padded(1)
    assert all(page.contains(*b.min) and page.contains(*b.max) for b in boxes)
    assert fig.get_figwidth() <= style.SIZES[size][0]


@pytest.mark.parametrize(
    ("number", "size", "columns"),
    [(3, "wide", 3), (4, "wide", 2), (5, "wide", 3), (3, "small", 1), (1, "wide", 1)],
)
def test_landscape_panels_are_equal_squares_side_by_side_or_stacked(
    number, size, columns
):
    fig = landscape([str(k) for k in range(number)], size)
    FigureCanvasAgg(fig).draw()
    boxes = [ax.get_window_extent() for ax in fig.axes]
    assert len({round(b.x0) for b in boxes}) == columns
    for box in boxes:
        assert box.width == pytest.approx(box.height, rel=0.01)
        assert box.width == pytest.approx(boxes[0].width, rel=0.01)
        assert box.width > 1.7 * fig.dpi


def test_landscape_draws_paths_circle_and_star_where_they_are():
    fig = landscape(["a", "b"])
    for ax in fig.axes:
        lines = lines_of(ax)
        for expected in (CIRCLE, [(0, 1)], *PATHS.values()):
            assert any(np.array_equal(line, expected) for line in lines)
        for path in PATHS.values():
            for end in (path[:1], path[-1:]):
                assert any(np.array_equal(line, end) for line in lines)


def test_landscape_contours_are_where_the_function_has_their_level():
    (ax,) = landscape(["a"]).axes
    filled, lines = ax.collections
    for level, path in zip(lines.levels, lines.get_paths(), strict=True):
        drawn = path.codes[1:] == path.LINETO
        x, y = (path.vertices[1:] + path.vertices[:-1])[drawn].T / 2
        np.testing.assert_allclose(x**2 + 4 * y**2, level, atol=0.06)
    assert len(lines.levels) >= 8
    assert sum(len(p.vertices) for p in filled.get_paths()) < 3000


def test_landscape_cuts_a_path_that_runs_away():
    path = [(0, 0), (1, 1), (-1e9, 1), (np.inf, np.nan)]
    fig = plots.landscape(AXIS, AXIS, {"a": plots.Panel(BOWL, {"p": path})})
    FigureCanvasAgg(fig).draw()
    assert all(np.isfinite(line).all() for line in lines_of(fig.axes[0]))
    assert any(np.array_equal(line, path[:2]) for line in lines_of(fig.axes[0]))
    assert fig.axes[0].get_xlim() == (-2, 2)


def test_landscape_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="no panels"):
        plots.landscape(AXIS, AXIS, {})
    with pytest.raises(
        ValueError, match=r"'a' have the shape \(80, 81\), .*\(81, 81\)"
    ):
        plots.landscape(AXIS, AXIS, {"a": plots.Panel(BOWL[1:])})
    with pytest.raises(ValueError, match=r"'p' has the shape \(2,\)"):
        plots.landscape(AXIS, AXIS, {"a": plots.Panel(BOWL, {"p": [1, 2]})})
    with pytest.raises(ValueError, match="7 names of paths.*6"):
        many = {str(k): [(0, 0)] for k in range(7)}
        plots.landscape(AXIS, AXIS, {"a": plots.Panel(BOWL, many)})


def test_ticks_are_the_few_x_that_were_measured():
    few = {"a": [([1, 2, 4], [3.0, 2.0, 1.0])], "b": [([2, 8], [3.0, 2.0])]}
    figure = plots.learning_curves(few, xlabel="epoch", ylabel="loss", log_x=True)
    labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert labels == ["1", "2", "4", "8"]
    many = {"a": [(range(1, 50), [1.0] * 49)]}
    figure = plots.learning_curves(many, xlabel="step", ylabel="loss")
    assert len(figure.axes[0].get_xticks()) < 20


def test_pictures_are_on_one_scale_with_the_page_in_its_middle():
    images = {"a": [[0.0, 2.0]], "b": [[-4.0, 1.0]], "c": [[3.0, 0.0]]}
    fig = plots.pictures(images, label="score", columns=2)
    *panels, _ = fig.axes
    assert [ax.get_title() for ax in panels if ax.get_visible()] == ["a", "b", "c"]
    drawn = [ax.images[0] for ax in panels if ax.images]
    assert {image.get_clim() for image in drawn} == {(-4.0, 4.0)}
    nothing, little, much = drawn[0].cmap(drawn[0].norm([0.0, 1.0, 4.0]))
    assert nothing[3] < 0.01 < little[3] < much[3] == 1.0
    below, above = drawn[0].cmap(drawn[0].norm([-4.0, 4.0]))
    assert to_rgb(below) == pytest.approx(to_rgb(style.SERIES[1].color), abs=0.01)
    assert to_rgb(above) == pytest.approx(to_rgb(style.SERIES[0].color), abs=0.01)


@pytest.mark.parametrize(
    ("images", "message"),
    [({}, "no pictures"), ({"a": [1.0, 2.0]}, "'a' has 1 dimensions")],
)
def test_pictures_refuses_what_is_none(images, message):
    with pytest.raises(ValueError, match=message):
        plots.pictures(images, label="score")
