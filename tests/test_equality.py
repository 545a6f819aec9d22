"""The one comparison of all systems: what counts as a difference."""

import math

import pytest
import torch

from cdopt_tutorial.equality import max_difference


def test_the_largest_gap_of_any_tensor_is_found_and_nan_is_one():
    good, bad = torch.zeros(2), torch.tensor([math.nan, 0.0])
    values = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[0.0, -3.0]])}
    moved = {"b": torch.tensor([[0.5, -3.0]]), "a": torch.tensor([1.0, 2.0])}
    assert max_difference(values, moved) == max_difference(moved, values) == 4.0
    assert max_difference(values, dict(values)) == 0.0
    for pair in ((bad, good), (good, bad), (bad, bad)):
        for first, last in ("ab", "ba"):  # whichever comes first
            one, other = ({first: good, last: each} for each in pair)
            assert max_difference(one, other) == math.inf


@pytest.mark.parametrize("other", [{}, {"b": torch.zeros(2)}, {"a": torch.zeros(1)}])
def test_other_names_or_shapes_are_refused(other):
    for one, two in (({"a": torch.zeros(2)}, other), (other, {"a": torch.zeros(2)})):
        with pytest.raises(ValueError, match="can't be compared with"):
            max_difference(one, two)
