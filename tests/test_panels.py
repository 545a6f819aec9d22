"""Curves of the same methods side by side: one look each, and an end that is told."""

import math

import pytest

from cdopt_tutorial.plots import panels

LOW = {"one": [1.0, 0.5, 0.25], "many": [1.0, 0.25, 0.125]}
HIGH = {"many": [1.0, 1e9, math.nan], "one": [1.0, 0.5, 0.25]}


@pytest.fixture
def axes():
    return panels({"low": LOW, "high": HIGH}, xlabel="x", ylabel="y").axes


def test_a_method_looks_the_same_in_all_panels(axes):
    looks = [
        {line.get_label(): (line.get_color(), line.get_marker()) for line in ax.lines}
        for ax in axes
    ]
    assert looks[0] == looks[1] and len(set(looks[0].values())) == 2


def test_a_curve_ends_before_what_is_not_finite_and_says_so(axes):
    drawn = [
        {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
        for ax in axes
    ]
    assert drawn[0]["one"] == drawn[1]["one"] == [[1, 1.0], [2, 0.5], [3, 0.25]]
    assert drawn[1]["many"] == [[1, 1.0], [2, 1e9]]
    assert [len(ax.texts) for ax in axes] == [0, 1]


def test_only_a_wide_panel_is_logarithmic(axes):
    assert [ax.get_yscale() for ax in axes] == ["linear", "log"]


def test_what_can_not_be_drawn_is_refused():
    with pytest.raises(ValueError, match="'one' has no finite y to begin with"):
        panels({"low": {"one": [math.inf]}}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="13 curves, but there are 12 looks"):
        panels({"low": {str(i): [1.0] for i in range(13)}}, xlabel="x", ylabel="y")
