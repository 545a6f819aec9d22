"""What a model has learnt of each pixel, where one can say what it has learnt."""

import torch

from cdopt_tutorial.data.bags import digit_bags
from cdopt_tutorial.hybrid import HybridConfig, Job, make
from cdopt_tutorial.hybrid.picture import ink_scores


def model_that_likes(pixel, data, **constraint):
    """Each level of grey of one pixel adds as much to the score of class 3."""
    config = HybridConfig(embedding=1, dtype="float64", **constraint)
    table = torch.zeros(data.num_tokens, 1, dtype=torch.float64)
    table[17 * pixel : 17 * (pixel + 1), 0] = torch.arange(17)
    dense = torch.zeros(10, 1, dtype=torch.float64)
    dense[3] = 1.0
    weights = {"table.weight": table, "dense.bias": torch.randn(10)}
    name = "parametrizations.weight.original" if constraint else "weight"
    return make(Job(config, data, {**weights, f"dense.{name}": dense}))


def test_a_pixels_slope_is_its_spread_by_what_a_level_adds():
    data, pixel = digit_bags(), 27
    level = (data.train.tokens.view(-1, 64)[:, pixel] % 17).double()
    for constraint in ({}, {"manifold": "stiefel"}):
        model = model_that_likes(pixel, data, **constraint)
        found = ink_scores(model, data.train)
        assert found.shape == (10, 64)
        spread = level.std(correction=0)
        others = [c for c in range(10) if c != 3]
        torch.testing.assert_close(found[3, pixel], 0.9 * spread)
        torch.testing.assert_close(found[others, pixel], (-0.1 * spread).expand(9))
        found[:, pixel] = 0
        assert found.abs().max() < 1e-12


def test_a_pixel_that_never_changes_says_nothing():
    data = digit_bags()
    corner = data.train.tokens.view(-1, 64)[:, 0]
    assert corner.unique().numel() == 1
    assert (ink_scores(model_that_likes(0, data), data.train)[:, 0] == 0).all()
