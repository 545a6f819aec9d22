"""Dissolved layers are copied, pickled and handled by torch like plain ones."""

import copy
import pickle

import pytest
import torch
from constrained import F64, dissolved, free, lstm, move_
from torch import nn
from torch.nn.utils import parametrize

from cdopt_tutorial import constraints


def models():
    """One of each structure, with an input."""
    shared = dissolved(5, 5)
    return [
        (dissolved(), torch.randn(3, 8, **F64)),
        (nn.Sequential(shared, nn.Sequential(shared)), torch.randn(3, 5, **F64)),
        (lstm(num_layers=2), torch.randn(4, 3, 5, **F64)),
        (
            constraints.dissolve(nn.Conv1d(3, 5, 2, **F64), manifold="oblique"),
            torch.randn(2, 3, 6, **F64),
        ),
    ]


def result(model, x):
    output = model(x)
    return output[0] if isinstance(output, tuple) else output


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


COPIES = by_pickle, copy.deepcopy


class TestCopies:
    @pytest.mark.parametrize("copied_by", COPIES)
    @pytest.mark.parametrize("number", range(4))
    def test_is_equal_and_separate(self, copied_by, number):
        model, x = models()[number]
        output = result(move_(model), x)  # a pass's graph doesn't get in the way
        copied = copied_by(model)
        assert type(copied).__name__ == type(model).__name__
        names = [name for name, _ in model.named_parameters()]
        assert [name for name, _ in copied.named_parameters()] == names
        assert torch.equal(result(copied, x), output)
        assert constraints.penalty(copied) == constraints.penalty(model) > 0
        output.sum().backward()
        assert all(p.grad is None for p in copied.parameters())
        other, _ = models()[number]
        other.load_state_dict(copied.state_dict())
        assert torch.equal(result(other, x), output)
        move_(copied)
        assert torch.equal(result(model, x), output)
        for layer in copied.modules():
            if parametrize.is_parametrized(layer):
                for name in list(layer.parametrizations):
                    parametrize.remove_parametrizations(layer, name)
        assert torch.equal(result(model, x), output)

    @pytest.mark.parametrize("copied_by", COPIES)
    def test_keeps_what_a_layer_refers_to(self, copied_by):
        shared = copied_by(models()[1][0])
        assert shared[0] is shared[1][0]
        layer = dissolved()
        layer.call = layer.forward
        copied = copied_by(layer)
        assert copied.call.__self__ is copied

    def test_a_shallow_copy_leaves_the_original_alone(self):
        layer = move_(dissolved())
        output = layer(torch.ones(1, 8, **F64)).sum()
        state = free(layer).data_ptr(), free(layer)._version
        assert free(copy.copy(layer)) is free(layer)
        assert (free(layer).data_ptr(), free(layer)._version) == state
        output.backward()

    def test_needs_no_projection(self):
        layer = dissolved()
        nn.init.constant_(free(layer), float("nan"))
        copied = by_pickle(copy.deepcopy(layer))
        torch.testing.assert_close(free(copied), free(layer), equal_nan=True)

    @pytest.mark.parametrize("copied_by", COPIES)
    def test_an_optimizer_that_is_copied_along_moves_the_copy(self, copied_by):
        layer = move_(dissolved())
        optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
        step(layer, optimizer)
        other, its_optimizer = copied_by((layer, optimizer))
        for _ in range(2):
            step(layer, optimizer)
            assert not torch.equal(free(other), free(layer))
            step(other, its_optimizer)
            assert torch.equal(free(other), free(layer))

    def test_on_meta(self):
        for layer in dissolved().to("meta"), lstm().to("meta"):
            for copied in copy.deepcopy(layer), by_pickle(layer):
                assert {p.device.type for p in copied.parameters()} == {"meta"}


def step(layer, optimizer):
    optimizer.zero_grad()
    (layer(torch.ones(1, 8, **F64)).sum() + constraints.penalty(layer)).backward()
    optimizer.step()


class TestTorch:
    """What torch's own tools do to a dissolved layer."""

    def test_assigning_projects(self):
        layer, target = dissolved(), torch.randn(4, 8, **F64)
        before = free(layer)
        layer.weight = target
        assert free(layer) is before
        polar = torch.linalg.svd(target, full_matrices=False)
        torch.testing.assert_close(layer.weight, polar.U @ polar.Vh)

    def test_taking_it_off_leaves_the_mapped_weight(self):
        for layer, name in (dissolved(), "weight"), (lstm(), "weight_hh_l0"):
            mapped = getattr(move_(layer), name).detach()
            parametrize.remove_parametrizations(layer, name)
            assert isinstance(getattr(layer, name), nn.Parameter)
            assert torch.equal(getattr(layer, name), mapped)
            copied = by_pickle(layer)
            assert torch.equal(getattr(copied, name), mapped)
            constraints.dissolve(layer, name)
            assert constraints.feasibility(layer).weight < 1e-12

    def test_cached(self):
        """One graph serves two passes, and the penalty."""
        layer, x = move_(lstm()), torch.randn(4, 3, 5, **F64)
        gradients = []
        for context in parametrize.cached, torch.enable_grad:
            layer.zero_grad()
            with context():
                loss = layer(x)[0].sum() + layer(x)[0].square().sum()
                (loss + constraints.penalty(layer)).backward()
            gradients.append(free(layer, "weight_hh_l0").grad)
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)

    def test_autocast(self):
        """The map and the penalty keep their precision; the layer may lose it."""
        layer = constraints.dissolve(nn.Linear(64, 32))
        move_(layer)
        x, gradients = torch.ones(3, 64), []
        for enabled in False, True:
            for first in False, True:
                layer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    output = layer(x) if first else None
                    penalty = constraints.penalty(layer)
                penalty.backward()
                gradients.append(free(layer).grad)
        assert output.dtype == torch.bfloat16 and penalty.dtype == torch.float32
        for other in gradients[1:]:
            torch.testing.assert_close(other, gradients[0])
        layer(x).sum().backward()

    def test_freezing_and_unfreezing_between_pass_and_penalty(self):
        layer = move_(dissolved()).requires_grad_(False)
        layer(torch.ones(1, 8, **F64))
        layer.requires_grad_(True)
        constraints.penalty(layer).backward()
        assert free(layer).grad.any()
        layer(torch.ones(1, 8, **F64))
        layer.requires_grad_(False)
        assert not constraints.penalty(layer).requires_grad
