"""A step of a constrained layer: what is timed is what it says."""

import pytest
import torch

from cdopt_tutorial.dissolving import costs


def layer_of(step) -> torch.nn.Module:
    """The layer that a step trains."""
    cells = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
    return cells["layer"].cell_contents


def weight_of(step) -> torch.Tensor:
    """The weight (d/2, d) with which the layer of a step computes."""
    layer = layer_of(step)
    if isinstance(layer, costs._Transposed):
        return layer.weight.mT.detach()
    if hasattr(layer, "manifold"):  # cdopt's keeps the free weight there
        return layer.A(layer.weight).detach()
    return layer.weight.detach()


@pytest.mark.parametrize("name", costs.VARIANTS)
def test_a_step_trains_and_keeps_the_rows_orthonormal(name):
    torch.manual_seed(0)
    step = costs.make_step(name, 16, 8)
    before = weight_of(step).clone()
    for _ in range(20):
        step()
    weight = weight_of(step)
    assert weight.shape == (8, 16) and weight.dtype == torch.float32
    assert not torch.equal(weight, before)
    off = torch.linalg.norm(weight @ weight.T - torch.eye(8))
    assert off > 0.1 if name == "plain" else off < 1e-5


@pytest.mark.parametrize("name", costs.EXACT)
def test_a_variant_of_torchs_computes_by_the_map_of_its_name(name):
    (rule,) = layer_of(costs.make_step(name, 16, 8)).parametrizations.weight
    assert rule.orthogonal_map.name == name


def test_fused_and_cdopt_take_the_same_steps():
    weights = {}
    for name in ("fused", "cdopt.nn"):
        torch.manual_seed(3)
        step = costs.make_step(name, 16, 8)
        for _ in range(20):
            step()
        weights[name] = weight_of(step)
    torch.testing.assert_close(weights["fused"], weights["cdopt.nn"])


def test_costs_are_relative_to_the_plain_layer_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    found = costs.step_costs([8], budget=1e-3)
    assert list(found) == list(costs.VARIANTS) and found["plain"] == [(8, 1.0)]
    assert torch.equal(torch.get_rng_state(), state)
