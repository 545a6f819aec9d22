"""The bench of constrained layers: what it times is what it says."""

import math
import time

import pytest
import torch

from cdopt_tutorial.bench import constraints as bench


def weight_of(step) -> torch.Tensor:
    """The weight (d/2, d) with which the layer of a step computes."""
    layer = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))["layer"]
    layer = layer.cell_contents
    if isinstance(layer, bench._Transposed):
        return layer.weight.mT.detach()
    if hasattr(layer, "manifold"):  # cdopt's keeps the free weight there
        return layer.A(layer.weight).detach()
    return layer.weight.detach()


@pytest.mark.parametrize("name", bench.VARIANTS)
def test_a_step_trains_and_keeps_the_rows_orthonormal(name):
    torch.manual_seed(0)
    step = bench.make_step(name, 16)
    before = weight_of(step).clone()
    for _ in range(20):
        step()
    weight = weight_of(step)
    assert weight.shape == (8, 16) and weight.dtype == torch.float32
    assert not torch.equal(weight, before)
    off = torch.linalg.norm(weight @ weight.T - torch.eye(8))
    assert off > 0.1 if name == "plain" else off < 1e-5


def test_fused_and_cdopt_take_the_same_steps():
    weights = {}
    for name in ("fused", "cdopt.nn"):
        torch.manual_seed(3)
        step = bench.make_step(name, 16)
        for _ in range(20):
            step()
        weights[name] = weight_of(step)
    torch.testing.assert_close(weights["fused"], weights["cdopt.nn"])


def test_a_turn_times_one_step_on_one_thread():
    torch.set_num_threads(2)
    seen = []

    def step():
        seen.append(torch.get_num_threads())
        time.sleep(0.002)

    found = bench._time(step, 0.02, 1)["step"]
    assert 0.002 <= found < 0.02  # a step, not the turn, and in seconds
    assert len(seen) <= 30  # as the budget says, which is not torch's own
    assert set(seen) == {1} and torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_costs_are_relative_to_the_plain_layer_of_each_width(monkeypatch):
    def seconds(step, budget, turn):
        assert budget == 0.5
        return {"step": [1.0, 3.0, 8.0][turn - 1] * step}

    monkeypatch.setattr(bench, "_time", seconds)
    monkeypatch.setattr(bench, "VARIANTS", ("plain", "fused"))
    monkeypatch.setattr(
        bench, "make_step", lambda name, d, _: d if name == "plain" else d * d
    )
    assert bench.step_costs([4, 10], turns=3, budget=0.5) == {
        "plain": [(4, 1), (10, 1)],
        "fused": [(4, 4), (10, 10)],
    }


def test_costs_are_finite_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    costs = bench.step_costs([8], turns=1, budget=1e-3)
    assert list(costs) == list(bench.VARIANTS)
    assert torch.equal(torch.get_rng_state(), state)
    for line in costs.values():
        ((d, ratio),) = line
        assert d == 8 and math.isfinite(ratio) and ratio > 0


def test_a_smoke_run_compares_each_width_with_its_own_plain_layer():
    lines = []
    rows, more = bench.measure(lines.append, smoke=True)
    assert len(rows) == len(lines) == len(bench.VARIANTS)
    assert {row.baseline for row in rows} == {"plain, d=64: step"}
    values = {row.name: row.value for row in rows}
    for name, by_p in more["fused over"].items():
        expected = values["fused, d=64: step"] / values[f"{name}, d=64: step"]
        assert by_p == {32: pytest.approx(expected)}


@pytest.mark.parametrize("smoke", [False, True])
def test_a_smoke_run_alone_leaves_out_widths_and_turns(smoke, monkeypatch):
    monkeypatch.setattr(bench, "_time", lambda *_: {"step": 1.0})
    monkeypatch.setattr(bench, "make_step", lambda *_: None)
    _, more = bench.measure(lambda _: None, smoke)
    assert list(more["values"]) == ([64] if smoke else [64, 128, 256, 512, 1024])
    for of in more["values"].values():
        assert {len(each["step"]) for each in of.values()} == {1 if smoke else 7}


@pytest.mark.parametrize("width", [7, 0])
def test_what_can_not_be_timed_is_refused(width):
    with pytest.raises(ValueError, match=f"width is {width}, but must be even"):
        bench.step_costs([8, width], turns=1, budget=1)
