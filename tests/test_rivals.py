"""Dissolving's rivals: each as its paper says, and in parts as in one process."""

from functools import partial

import pytest
import torch
from constrained import drawn
from hypothesis import given
from hypothesis import strategies as st
from rival_roles import EXACT, RANKS, play_rivals, start

from cdopt_tutorial.constraints import rivals
from cdopt_tutorial.constraints.fused import sums_of
from cdopt_tutorial.constraints.surface import surface
from cdopt_tutorial.dissolving.eigenspace import polar
from cdopt_tutorial.engines import Role, launch

pytestmark = pytest.mark.xdist_group("rivals")

C = 4 * 4
LR = 0.05
SIZES = st.integers(1, 9)
# What a step of each sends, in numbers, for a weight of 4 columns in rows.
SENT = {
    "projected": (1, C), "landing": (1, 2 * C), "pogo": (2, 3 * C),
    "penalty": (1, C), "muon": (1, C), "manifold-muon": (1, 3 * C),
}  # fmt: skip


@pytest.fixture(scope="module")
def played():
    """What the ranks found."""
    roles = {f"rank{i}": Role(play_rivals, (i,)) for i in range(RANKS)}
    return launch(roles, deadline=300).values()


@pytest.mark.parametrize("rule", EXACT)
def test_parts_are_moved_as_in_one_process(played, rule):
    for rank in played:
        assert 0 < rank["differences"][rule] <= EXACT[rule]
        assert rank["differences"]["control"] > 1e-2  # where no rank asks the others


def test_only_small_sums_cross_the_wire(played):
    assert all(rank["sent"] == SENT for rank in played)


def penalised(x, g):
    eye = torch.eye(x.shape[1]).to(x)
    x = x.clone().requires_grad_()
    loss = (x * g).sum() + 0.5 * (x.mT @ x - eye).square().sum()
    return x.detach() - LR * torch.autograd.grad(loss, x)[0]


def landed(x, g):
    skew = (g @ x.mT - x @ g.mT) / 2
    return x - LR * (skew @ x + x @ (x.mT @ x - torch.eye(x.shape[1]).to(x)))


def pogo(x, g):
    x = x - LR * (g @ x.mT - x @ g.mT) / 2 @ x
    return x + 0.5 * x @ (torch.eye(x.shape[1]).to(x) - x.mT @ x)


def muon(x, g):
    y, (a, b, c) = g / g.norm(), rivals.NEWTON_SCHULZ
    for _ in range(5):
        y = a * y + b * y @ y.mT @ y + c * y @ y.mT @ y @ y.mT @ y
    return x - LR * y


#: Each with the matrix whole and tall, as in the paper.
PAPERS = {
    rivals.projected: lambda x, g: polar(x - LR * g),
    rivals.landing: landed,
    rivals.pogo: pogo,
    rivals.muon: muon,
    partial(rivals.penalised, penalty_param=0.5): penalised,
}


@given(st.sampled_from([*PAPERS]), SIZES, SIZES, SIZES)
def test_a_step_is_that_of_the_paper(rule, rows, columns, seed):
    x, g = start("", rows, columns, 1, seed), drawn((rows, columns), seed + 1)
    found = rule(x, g, sums_of(x), LR)
    wide = rows < columns
    x, g = (x.mT, g.mT) if wide else (x, g)
    expected = PAPERS[rule](x, g)
    assert (found - (expected.mT if wide else expected)).abs().max() <= 1e-12


def test_muon_is_torchs_within_the_rounding_of_bfloat16():
    x, (first, second) = drawn((24, 8), 0), (drawn((24, 8), s) for s in (1, 2))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    scale = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "momentum": 0.9}
    one = rivals.Rival("muon", {ours: surface("stiefel", x)}, LR, 0.9)
    other = torch.optim.Muon([theirs], LR, **scale)
    for grad in first, second:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        one.step()
        other.step()
    assert 0 < (ours - theirs).norm() < 0.02 * (ours - x).norm()


@pytest.mark.parametrize("shape", [(20, 6), (6, 20), (7, 7)])
def test_manifold_muon_takes_the_steepest_tangent_step(shape):
    x, g = polar(drawn(shape, 0)), drawn(shape, 1)
    step = (rivals.manifold_muon(x, g, sums_of(x), 1e-4) - x) / 1e-4
    x, g, step = (t if shape[0] >= shape[1] else t.mT for t in (x, g, step))
    assert (x.mT @ step + step.mT @ x).abs().max() < 1e-3
    assert torch.linalg.matrix_norm(step, 2) < 1 + 1e-3
    # No tangent step of that norm goes down further than any dual value says.
    dual = torch.zeros(min(shape), min(shape), dtype=x.dtype)
    for number in range(300):
        a = polar(g + 2 * x @ dual)
        dual = dual - 0.2 * (1 - number / 300) * (x.mT @ a + a.mT @ x)
    bound = torch.linalg.matrix_norm(g + 2 * x @ dual, "nuc")
    assert -(g * step).sum() == pytest.approx(bound, rel=1e-3)
    new = rivals.manifold_muon(x, g, sums_of(x), LR)
    assert torch.dist(new.mT @ new, torch.eye(min(shape)).to(new)) < 1e-12
