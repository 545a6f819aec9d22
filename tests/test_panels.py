"""Panels, ranges and kinds: what each draws, and that nothing hides another."""

import math

import numpy as np
import pytest

from cdopt_tutorial import plots

LOW = {"one": [1.0, 0.5, 0.25], "many": [1.0, 0.25, 0.125]}
HIGH = {"many": [1.0, 1e9, math.nan], "one": [1.0, 0.5, 0.25]}


@pytest.fixture
def axes():
    return plots.panels({"low": LOW, "high": HIGH}, xlabel="x", ylabel="y").axes


def test_a_method_looks_the_same_in_all_panels(axes):
    looks = [
        {line.get_label(): (line.get_color(), line.get_marker()) for line in ax.lines}
        for ax in axes
    ]
    assert looks[0] == looks[1] and len(set(looks[0].values())) == 2


def test_what_is_not_finite_is_left_out_and_one_wide_curve_does_not_hide_others(axes):
    low, high = axes
    assert (low.get_yscale(), high.get_yscale()) == ("linear", "log")
    assert low.lines[0].get_xydata().tolist() == [[1, 1.0], [2, 0.5], [3, 0.25]]
    assert low.get_ylim()[0] == 0 and high.get_ylim()[1] == 1e3
    assert high.get_ylim()[0] < 0.25


X = [1, 8, 32]
REPEATS = [(X, [10, 200, 4000]), (X, [30, 100, 1000]), (X, [20, 300, 2000])]


@pytest.fixture
def ax():
    curves = {"one": REPEATS, "equal": REPEATS, "another": REPEATS}
    (ax,) = plots.ranges(curves, xlabel="x", ylabel="y").axes
    return ax


def test_a_bar_goes_from_the_least_to_the_most_through_the_median(ax):
    for line, bars in zip(ax.lines, ax.collections, strict=True):
        x, y = line.get_data()
        assert y.tolist() == [20, 200, 2000]
        found = np.array(bars.get_segments())
        np.testing.assert_allclose(found[..., 0], np.stack([x, x], 1))
        np.testing.assert_allclose(found[..., 1], [[10, 30], [100, 300], [1000, 4000]])


def test_equal_curves_stand_side_by_side_around_the_x_that_was_measured(ax):
    places = np.array([line.get_xdata() for line in ax.lines])
    assert (np.diff(places, axis=0) > 0).all()
    np.testing.assert_allclose(np.exp(np.log(places).mean(0)), X)
    # Those of one x stay together.
    assert (places[-1, :-1] < places[0, 1:]).all()
    assert ax.get_xticks().tolist() == X
    assert len({line.get_marker() for line in ax.lines}) == 3
    (legend,) = ax.figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["one", "equal", "another"]
