"""The problem whose answer is known: dissolving finds it, within limits."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdopt_tutorial.data.digits import covariance, load_digits
from cdopt_tutorial.dissolving import eigenspace
from cdopt_tutorial.dissolving.eigenspace import (
    METHODS,
    NEAR,
    TARGET,
    Problem,
    best_lr,
    digits_problem,
    distance,
    polar,
    solve,
)

DISSOLVING = [name for name in METHODS if name.startswith("dissolving")]


@pytest.fixture(scope="module")
def problem():
    return digits_problem()


def diagonal(*values: float, p: int = 1) -> Problem:
    return Problem(torch.diag(torch.tensor(values, dtype=torch.float64)), p)


# The digits


def test_the_digits_are_those_of_scikit_learn():
    digits = load_digits()
    assert digits.images.shape == (1797, 64) and digits.images.dtype == torch.float64
    assert digits.labels.shape == (1797,) and digits.labels.dtype == torch.int64
    assert digits.images.min() == 0 and digits.images.max() == 1
    assert torch.equal(digits.images * 16, (digits.images * 16).round())
    assert digits.labels.unique().tolist() == list(range(10))
    # The first is a 0: a ring, with nothing in the middle.
    assert digits.labels[0] == 0
    ring = digits.images[0].view(8, 8)
    assert ring[3:5, 3:5].max() < 0.1 < 0.4 < ring[3, 2]


@given(st.integers(0, 1_000), st.integers(2, 20), st.integers(1, 6))
def test_the_covariance_is_the_mean_of_products_about_the_mean(seed, n, d):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, d, generator=generator, dtype=torch.float64)
    found = covariance(images)
    torch.testing.assert_close(found, torch.cov(images.T).view(d, d))
    torch.testing.assert_close(covariance(images + 3), found)


@pytest.mark.parametrize("shape", [(1, 4), (4,), (0, 3)])
def test_images_without_a_covariance_are_refused(shape):
    with pytest.raises(ValueError, match="at least 2"):
        covariance(torch.zeros(shape))


# The problem


@settings(max_examples=25)
@given(st.integers(0, 1_000), st.integers(1, 4))
def test_no_point_of_the_manifold_is_below_the_minimum(seed, p):
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    problem = Problem(half + half.T, p)
    best = problem.eigen[1][:, :p]
    assert problem.value(best).item() == pytest.approx(problem.minimum, abs=1e-12)
    assert problem.angle(best) < 1e-7
    assert problem.gap(problem.start(seed)) > 0


def test_gap_and_angle_by_hand():
    problem = diagonal(2, 1, 0)
    assert problem.minimum == -1
    turned = torch.tensor([[math.cos(0.3)], [math.sin(0.3)], [0]], dtype=torch.float64)
    assert problem.angle(turned) == pytest.approx(0.3)
    expected = 1 - (2 * math.cos(0.3) ** 2 + math.sin(0.3) ** 2) / 2
    assert problem.gap(turned) == pytest.approx(expected)


def test_the_polar_projection_is_feasible_and_keeps_the_span(problem):
    x = problem.start(0) @ torch.diag(torch.tensor([3, 2, 1, 0.5, 0.1]).double())
    assert distance(x) > 8
    assert distance(polar(x)) < 1e-13
    torch.testing.assert_close(polar(x), problem.start(0))
    assert polar(x * math.nan).isnan().all()


@pytest.mark.parametrize(
    ("matrix", "p", "message"),
    [
        (torch.eye(3), 3, "p is 3"),
        (torch.eye(3), 0, "p is 0"),
        (torch.ones(3, 2), 1, "symmetric"),
        (torch.ones(3, 3).triu(), 1, "symmetric"),
        (torch.ones(3), 1, "symmetric"),
    ],
)
def test_a_problem_out_of_range_is_refused(matrix, p, message):
    with pytest.raises(ValueError, match=message):
        Problem(matrix, p)


# The methods


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("method", DISSOLVING)
def test_dissolving_finds_the_answer_of_eigh(method, seed, problem):
    run = solve(method, problem, seed)
    assert run.gap[0] > 0.5 and abs(run.gap[-1]) <= 1e-6
    assert run.feasibility[-1] <= 1e-6
    assert distance(run.x) <= 1e-10
    best = problem.eigen[1][:, : problem.p]
    assert torch.linalg.norm(run.x @ run.x.T - best @ best.T) < 1e-3
    assert run.angle < 1e-3


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(DISSOLVING)))
def test_the_peers_find_it_and_never_leave_the_manifold(method, problem):
    run = solve(method, problem, seed=1)
    assert abs(run.gap[-1]) <= TARGET
    assert max(run.feasibility) < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_all_start_at_the_same_point_and_record_every_step(method, problem):
    run = solve(method, problem, seed=4, steps=3)
    assert run.gap[0] == pytest.approx(problem.gap(problem.start(4)))
    assert len(run.seconds) == len(run.gap) == len(run.feasibility) == 4
    assert run.seconds[0] == 0 and run.seconds == sorted(run.seconds)
    again = solve(method, problem, seed=4, steps=3)
    assert again.gap == run.gap and torch.equal(again.x, run.x)


def test_to_evaluate_does_not_count_into_the_time(problem, monkeypatch):
    now = [0.0]

    def slow(x):
        now[0] += 100
        return distance(x)

    monkeypatch.setattr(eigenspace.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(eigenspace, "distance", slow)
    assert solve("geoopt", problem, steps=3).seconds == [0, 0, 0, 0]
    assert now[0] == 400


def test_an_unknown_method_is_refused(problem):
    with pytest.raises(ValueError, match="'newton'.*geoopt"):
        solve("newton", problem)


# The penalty


def test_without_a_penalty_this_problem_is_solved_from_a_feasible_start(problem):
    """f∘A has a strict minimum on the manifold where all of the answer's λ are > 0."""
    run = solve("dissolving, SGD", problem, penalty_param=0)
    assert run.gap[-1] <= 1e-6 and run.feasibility[-1] < 1e-6


def test_the_penalty_must_outweigh_the_least_curvature(problem):
    """Σ - I has the same answer as Σ, and needs penalty_param > ⅜ (1 - λ_p).

    Across the manifold, along the answer's j-th column, f(A(X)) curves by 3 (λ_j - 1)
    and the penalty by 8 penalty_param.
    """
    shifted = Problem(problem.matrix - torch.eye(64, dtype=torch.float64))
    threshold = 3 / 8 * (1 - problem.eigen[0][4].item())

    def feasibility(share: float) -> float:
        run = solve(
            "dissolving, SGD",
            shifted,
            steps=2_500,
            lr=0.1,
            penalty_param=share * threshold,
        )
        return run.feasibility[-1]

    assert feasibility(1.1) < 1e-6
    assert feasibility(0.9) > 0.05
    assert feasibility(0) > 1


def test_the_dissolved_problem_has_no_minimum_far_from_the_manifold(problem):
    """Its term of degree six is negative, whatever the penalty: L-BFGS can fall off."""
    start, values = problem.start(0), []
    for size in (1, 3, 10, 100):
        held = METHODS["dissolving, SGD"].hold(problem, size * start, 10.0)
        values.append(held.loss().item())
    assert values[1] > values[0]  # the well's wall
    assert values[3] < -1e6
    fallen = solve("dissolving, L-BFGS", problem, penalty_param=0.1)
    assert math.isnan(fallen.gap[-1]) and math.isnan(fallen.angle)
    assert len(fallen.gap) < 26


# The learning rates


@pytest.mark.parametrize("method", ["dissolving, SGD", "projection"])
def test_the_learning_rates_are_those_that_the_search_finds(method, problem):
    own = METHODS[method].lr
    grid = [own / 2**0.5, own, own * 2**0.5]
    grid = [lr for lr in grid if lr <= max(eigenspace.GRID)]
    assert best_lr(method, problem, [0, 1, 2], grid) == pytest.approx(own)


def test_the_search_prefers_what_arrives_first_and_stays(problem, monkeypatch):
    run = solve("geoopt", problem, steps=1)

    def found(_, __, seed, lr):
        gaps = {1: [1, 0, 1, 0, 0], 2: [1, 1, 0, 0, 0], 3: [1, 0, 0, 0, 0]}[lr]
        off = 2 * NEAR if lr == 3 else 0
        return replace(run, gap=gaps, feasibility=[off] * 5)

    monkeypatch.setattr(eigenspace, "solve", found)
    assert best_lr("geoopt", problem, seeds=[0], grid=[1, 2, 3]) == 2
    assert best_lr("geoopt", problem, seeds=[0], grid=[1, 3]) == 1
