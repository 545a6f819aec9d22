"""The one comparison of all systems: what counts as a difference."""

import math

import pytest
import torch

from cdopt_tutorial.equality import max_difference


def test_the_largest_gap_of_any_tensor_is_found():
    one = {"a": torch.tensor([1.0, -2.0]), "b": torch.zeros(2, 2)}
    other = {"b": torch.tensor([[0.0, 0.5], [0.0, -3.0]]), "a": torch.tensor([1.0, 2])}
    assert max_difference(one, other) == max_difference(other, one) == 4.0
    assert max_difference(one, dict(one)) == 0.0


def test_nan_is_a_difference_wherever_it_is():
    bad, good = torch.tensor([math.nan, 0.0]), torch.zeros(2)
    for one, other in ((bad, good), (good, bad), (bad, bad)):
        found = max_difference({"a": good, "b": one}, {"a": good, "b": other})
        assert found == math.inf
        assert max_difference({"b": one, "c": good}, {"b": other, "c": good}) == found


@pytest.mark.parametrize("other", [{}, {"b": torch.zeros(2)}, {"a": torch.zeros(1)}])
def test_other_names_or_shapes_are_refused(other):
    for one, two in (({"a": torch.zeros(2)}, other), (other, {"a": torch.zeros(2)})):
        with pytest.raises(ValueError, match="can't be compared with"):
            max_difference(one, two)
