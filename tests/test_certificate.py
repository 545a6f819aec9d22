"""Certified digits: exact, true under attack, by networks trained as they are said."""

import certificate as script
import climb
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import ways
from constrained import near
from hypothesis import given
from hypothesis import strategies as st

from cdopt_tutorial.dissolving import certificate
from cdopt_tutorial.dissolving.certificate import radii, scores, withstands
from cdopt_tutorial.study import stored

STUDY = stored("dissolving/certificate.json")
#: Of the ways that keep the singular values up to 1, their least.
LEAST = {"SPEL": 1, "projected": 1, "projected after Adam": 1, "AOL": 0}


def drawn(seed, *sizes):
    """Weights of a network of these sizes, and digits for it, some of them right."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    shapes = zip(sizes[1:], sizes[:-1], strict=True)
    weights = [torch.randn(shape, **draw) / 2 for shape in shapes]
    images = torch.randn(40, sizes[0], **draw)
    labels = torch.randint(sizes[-1], (40,), generator=generator)
    return weights, (images, labels)


@given(st.integers(0, 99), st.sampled_from([(5, 4, 3), (3, 6, 6, 2), (4, 3)]))
def test_radii_are_those_of_numpys_singular_values(seed, sizes):
    weights, (images, labels) = drawn(seed, *sizes)
    *inner, last = [weight.numpy() for weight in weights]
    found = radii(weights, (images, labels)).tolist()
    for x, y, radius in zip(images.numpy(), labels.tolist(), found, strict=True):
        slope = 1.0
        for weight in inner:
            slope *= np.linalg.svd(weight, compute_uv=False).max()
            pairs = np.sort((weight @ x).reshape(-1, 2), axis=1)
            x = np.concatenate([pairs[:, 1], pairs[:, 0]])
        apart = np.linalg.norm(last[y] - last, axis=1)
        leads = (last[y] - last) @ x
        others = [j for j in range(len(last)) if j != y]
        assert radius == pytest.approx(min(leads[others] / apart[others]) / slope)


@given(st.integers(0, 99), st.floats(0.01, 0.5))
def test_no_attack_beats_a_certificate_and_a_linear_one_is_the_distance(seed, radius):
    weights, digits = drawn(seed, 5, 4, 3)
    safe = radii(weights, digits) > radius
    assert withstands(weights, digits, radius)[safe].all()
    weights, digits = drawn(seed, 5, 2)
    certified = radii(weights, digits)
    clear = (certified - radius).abs() > 1e-9
    held = withstands(weights, digits, radius)
    assert torch.equal(held[clear], (certified > radius)[clear])


def test_training_is_the_loop_written_out():
    """By constraint dissolving, in plain torch."""
    (images, labels), _ = certificate.split()
    free = [layer.weight for layer in certificate.network(3)]
    adam, order = torch.optim.Adam(free, 0.02), torch.Generator().manual_seed(3)
    used = []
    for step in range(6):
        used, penalty = [], 0.0
        for w in free:
            gram, eye = w @ w.T, torch.eye(len(w), dtype=w.dtype)
            used.append((1.5 * eye - 0.5 * gram) @ w)
            penalty = penalty + 0.1 * (gram - eye).square().sum()
        batch = torch.randint(1_300, (64,), generator=order)
        x = images[batch]
        for w in used[:-1]:
            pairs = (x @ w.T).view(64, 32, 2)
            x = torch.cat([pairs.max(2).values, pairs.min(2).values], 1)
        loss = F.cross_entropy(2.0 * x @ used[-1].T, labels[batch]) + penalty
        adam.param_groups[0]["lr"] = 0.02 * (6 - step) / 6
        adam.zero_grad()
        loss.backward()
        adam.step()
    layers = certificate.network(3)
    how = ways.prepare("dissolved", layers, 0.02)
    found = certificate.train(
        layers, (images, labels), scale=2.0, seed=3, steps=6, **how
    )
    for w, weight in zip(free, found, strict=True):
        near(weight, (1.5 * torch.eye(len(w)).double() - 0.5 * w @ w.T) @ w, 1e-10)


@pytest.mark.parametrize("way", ways.WAYS)
def test_all_ways_start_as_one_function_and_keep_what_they_are_named_for(way):
    known, (images, _) = certificate.split()
    start = [layer.weight for layer in certificate.network(2)]
    layers = certificate.network(2)
    how = ways.prepare(way, layers, 0.01)
    off = 0.01 if way == "spectral norm" else 1e-9  # which is an estimate
    near(scores([layer.weight for layer in layers], images), scores(start, images), off)
    if way in LEAST:
        weights = certificate.train(layers, known, scale=4.0, seed=1, steps=10, **how)
        sizes = torch.cat([torch.linalg.svdvals(weight) for weight in weights])
        assert sizes.max() < 1 + 1e-9 and sizes.min() > LEAST[way] - 1e-9


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
def test_a_climb_ends_where_nothing_beside_is_better(i, j, slope):
    def score(cells):
        return [[-slope * abs(a - i) - abs(b - j)] for _, (a, b) in cells]

    (scores,) = climb.climb(score, ["way"], [(0, 0), (3, 3)]).values()
    assert climb.best(scores) == (i, j)
    assert {(i + up, j + over) for up, over in climb.BESIDE} <= {*scores}


def test_the_stored_ways_are_tuned_with_no_best_at_an_edge():
    assert [way for way, *_ in STUDY["chosen"]] == ways.WAYS
    for way, lr, scale in STUDY["chosen"]:
        tuned = [row[1:] for row in STUDY["tuned"] if row[0] == way]
        means = {(a, b): np.mean(found) for a, b, *found in tuned}
        assert means[lr, scale] == max(means.values())
        rates = [a for a, b in means if b == scale]
        scales = [b for a, b in means if a == lr]
        assert min(rates) < lr < max(rates) and min(scales) < scale < max(scales)


@pytest.mark.parametrize("way", ["dissolved", "free"])
def test_a_stored_run_is_trained_again(way):
    """Up to what rounding does to the training on another machine."""
    run = next(run for run in STUDY["runs"] if run["way"] == way)
    setting = [run[name] for name in ("way", "lr", "scale", "seed", "steps")]
    again = script.one(*setting)
    assert again["certified"] == pytest.approx(run["certified"], abs=5)
    assert again["withstood"] == pytest.approx(run["withstood"], abs=5)
