"""The problem with a known answer: dissolving finds it, within limits."""

import math

import pytest
import torch

from cdopt_tutorial.dissolving.eigenspace import (
    METHODS,
    Problem,
    digits_problem,
    solve,
)

TARGET = 1e-6  # the relative gap that learning rates were tuned to reach
DISSOLVING = [name for name in METHODS if name.startswith("dissolving")]


@pytest.fixture(scope="module")
def problem():
    return digits_problem()


def test_gap_by_hand():
    turned = torch.tensor([[math.cos(0.3)], [math.sin(0.3)], [0]], dtype=torch.float64)
    expected = 1 - (2 * math.cos(0.3) ** 2 + math.sin(0.3) ** 2) / 2
    problem = Problem(torch.diag(torch.tensor([2.0, 1.0, 0.0]).double()), p=1)
    assert problem.gap(turned) == pytest.approx(expected)


# The methods


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_answer_of_eigh(method, problem):
    # Those with a schedule or a line search have their own number of steps.
    own = method in ("dissolving, Adam", "dissolving, L-BFGS")
    run = solve(method, problem, seed=1, **({} if own else {"steps": 400}))
    assert run.gap[0] == pytest.approx(problem.gap(problem.start(1)))
    assert run.gap[0] > 0.5
    assert len(run.seconds) == len(run.gap) == len(run.feasibility)
    assert run.seconds[0] == 0 and run.seconds == sorted(run.seconds)
    assert abs(run.gap[-1]) <= TARGET
    if method not in DISSOLVING:  # which never leave the manifold
        assert max(run.feasibility) < 1e-10
    assert run.feasibility[-1] <= 1e-6


def test_a_run_repeats_and_leaves_the_random_state_alone(problem):
    state = torch.get_rng_state()  # torch's parametrization draws what it adds to X
    one, again = (solve("matrix_exp", problem, seed=4, steps=3) for _ in range(2))
    assert (again.gap, again.feasibility) == (one.gap, one.feasibility)
    assert torch.equal(torch.get_rng_state(), state)


# The penalty


def test_the_dissolved_problem_has_no_minimum_far_from_the_manifold(problem):
    """Its term of degree six is negative, whatever the penalty: L-BFGS can fall off."""
    with pytest.raises(torch.linalg.LinAlgError, match="non-finite"):
        solve("dissolving, L-BFGS", problem, penalty_param=0.1)
