"""Penalty, feasibility and projection of models of every kind, in one process."""

import copy

import cdopt.nn as theirs
import pytest
import torch
from cdopt.manifold_torch import (
    oblique_torch,
    stiefel_torch,
    symp_stiefel_torch,
)
from constrained import F64, dissolved, move_
from torch import nn

from cdopt_tutorial import constraints
from cdopt_tutorial.calls.references import reference

STIEFEL = {"manifold_class": stiefel_torch, "penalty_param": 0.3, **F64}
SHAPES = [(4, 8), (8, 4), (5, 5)]

quiet = pytest.mark.filterwarnings("ignore")


def violations(layer):
    """CDOpt's own ‖C‖ of a layer."""
    return float(theirs.get_constraint_violation(layer))


@quiet
class TestCdopt:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_equals_cdopts_own(self, shape):
        layer = move_(theirs.Linear_cdopt(*shape, **STIEFEL))
        exactly = {"rtol": 1e-12, "atol": 1e-14}
        terms = constraints.penalty(layer), theirs.get_quad_penalty(layer)
        torch.testing.assert_close(*terms, **exactly)
        found = constraints.feasibility(layer)
        assert found.weight == pytest.approx(violations(layer), rel=1e-12)
        grads = [torch.autograd.grad(term, layer.weight) for term in terms]
        torch.testing.assert_close(*grads, **exactly)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_of_unit_rows_or_columns_as_cdopt_takes_them(self, shape):
        options = STIEFEL | {"manifold_class": oblique_torch}
        layer = move_(theirs.Linear_cdopt(*shape, **options))
        with torch.no_grad():
            layer.weight[0].mul_(1.5)  # so that rows and columns differ
        expected = theirs.get_quad_penalty(layer)
        torch.testing.assert_close(constraints.penalty(layer), expected)
        constraints.project_(layer)
        assert violations(layer) < 1e-12

    def test_is_projected_and_measured_as_a_copy(self):
        layer = theirs.Linear_cdopt(4, 8, **STIEFEL)
        duplicate = move_(copy.deepcopy(layer))
        assert constraints.feasibility(layer).weight < 1e-12
        assert constraints.feasibility(duplicate).weight > 0.1
        constraints.project_(duplicate)
        found = constraints.feasibility(duplicate)
        assert found.weight < 1e-12 and found.mapped < 1e-12

    @pytest.mark.parametrize("kind", ["Conv2d_cdopt", "LSTM_cdopt", "GRUCell_cdopt"])
    def test_refuses_other_layers_of_cdopt(self, kind):
        layer = getattr(theirs, kind)(3, 4, 5, **STIEFEL)
        with pytest.raises(ValueError, match=f"{kind} is CDOpt's: dissolve a plain"):
            constraints.penalty(nn.Sequential(dissolved(), layer))

    def test_a_manifold_without_a_projection(self):
        options = {"penalty_param": 0.3, **F64}
        layer = theirs.Linear_cdopt(4, 8, manifold_class=symp_stiefel_torch, **options)
        model = move_(nn.Sequential(dissolved(), layer))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ValueError, match="1.weight: no projection of a weight"):
            constraints.project_(model)
        after = model.parameters()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@quiet
class TestModels:
    def test_sums_over_everything(self):
        parts = [
            move_(dissolved(penalty_param=0.2)),
            move_(dissolved(5, 5, manifold="sphere")),
            move_(constraints.dissolve_recurrent(nn.GRU(5, 6, 2, **F64))),
            move_(constraints.dissolve_recurrent(nn.LSTM(5, 6, 2, **F64))),
            move_(theirs.Linear_cdopt(4, 8, **STIEFEL)),
        ]
        model = nn.ModuleList([parts[0], nn.ModuleList(parts[1:]), nn.Linear(3, 3)])
        total = constraints.penalty(model)
        torch.testing.assert_close(total, sum(map(constraints.penalty, parts)))
        found = constraints.feasibility(model)
        assert len(found.layers) == 1 + 1 + 2 + 2 + 1
        assert {"0.weight", "1.1.weight_hh_l1", "1.3.weight"} < found.layers.keys()
        for kind in "weight", "mapped":
            each = [getattr(constraints.feasibility(part), kind) for part in parts]
            squares = sum(norm**2 for norm in each)
            assert getattr(found, kind) ** 2 == pytest.approx(squares, rel=1e-12)
        constraints.project_(model)
        assert constraints.feasibility(model).weight < 1e-12

    def test_of_several_models(self):
        """Also with equal names for their weights; each weight counts once."""
        one, other = move_(dissolved()), move_(dissolved(), 1.2)
        holder = nn.Sequential(one, nn.Sequential(one))
        for models in (
            (one, other),
            (reference(one), other, one),
            (reference(one), reference(other), reference(one)),
            (holder, other, holder),
        ):
            assert constraints.penalty(*models).item() == pytest.approx(
                0.1 * 4 * (0.21**2 + 0.44**2)
            )
            names = list(constraints.feasibility(*models).layers)
            assert [name.removesuffix(".weight") for name in names] in (
                ["0", "1"],
                ["0.0", "1"],
            )
        constraints.project_(one, other)
        assert constraints.feasibility(one, other).weight < 1e-12

    def test_refuses_what_only_an_attribute_refers_to(self):
        layer, model = dissolved(), nn.Sequential(nn.Tanh(), dissolved())
        parts = {"free": nn.Linear(3, 3), "dissolved": layer}
        model[0].parts = {name: reference(part) for name, part in parts.items()}
        model[0].others, model[0].path = [reference(model[1])], reference([])
        with pytest.raises(ValueError, match="^0.parts refers to a constrained module"):
            constraints.penalty(model)
        assert len(constraints.feasibility(model, layer).layers) == 2

    def test_refuses_what_is_not_constrained(self):
        for model in nn.Linear(3, 3), reference(nn.LSTM(3, 3)):
            with pytest.raises(ValueError, match="no weight of this model is cons"):
                constraints.Constraints(model)

    @pytest.mark.parametrize("projected", [False, True])
    def test_measures_a_float32_weight_in_float64(self, projected):
        """In float32, rounding alone would change either by about 1e-4."""
        layer = constraints.dissolve(nn.Linear(512, 256))
        if not projected:
            move_(layer, 1.001)
        w = layer.parametrizations.weight.original.detach().double()
        mapped = 1.5 * w - 0.5 * w @ w.mT @ w
        eye, found = torch.eye(256, **F64), constraints.feasibility(layer)
        off = (w @ w.mT - eye).norm().item(), (mapped @ mapped.mT - eye).norm().item()
        assert found.weight == pytest.approx(off[0], rel=1e-8)
        assert found.mapped == pytest.approx(off[1], rel=1e-5, abs=1e-13)


class TestProjection:
    @pytest.mark.parametrize("manifold", ["stiefel", "oblique"])
    @pytest.mark.parametrize("size", [1e-2, 1e-3])
    def test_hardly_changes_the_output(self, manifold, size):
        """A(W) is off by the square of W's distance, which bounds the change."""
        layer, x = dissolved(6, 6, manifold=manifold), torch.randn(9, 6, **F64)
        with torch.no_grad():
            for parameter in layer.parametrizations.parameters():
                parameter.add_(size * torch.randn(6, 6, **F64))
        before, far = layer(x), constraints.feasibility(layer).weight
        constraints.project_(layer)
        moved = (layer(x) - before).norm() / x.norm()
        assert 0 < moved < far**2

    def test_of_what_is_not_finite(self):
        layer = dissolved()
        nn.init.constant_(layer.parametrizations.weight.original, float("nan"))
        with pytest.raises(ValueError, match="^weight: "):
            constraints.project_(layer)
