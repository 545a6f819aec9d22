"""Dissolved layers of every kind: what they refuse, and what they compute."""

import copy
from functools import partial

import cdopt.manifold_torch
import pytest
import torch
from cdopt.manifold_torch import euclidean_torch, grassmann_torch, stiefel_torch
from cdopt.nn import Linear_cdopt, LSTM_cdopt, get_quad_penalty
from constrained import F64, free, lstm, move_
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints.layers import Dissolved

LAYERS = {
    "tall": lambda **k: nn.Linear(4, 8, **k),
    "wide": lambda **k: nn.Linear(8, 4, **k),
    "square": lambda **k: nn.Linear(5, 5, **k),
    "bilinear": lambda **k: nn.Bilinear(3, 4, 5, **k),
    "embedding": lambda **k: nn.Embedding(9, 4, **k),
    "conv2d": lambda **k: nn.Conv2d(2, 20, 3, **k),
    "transposed": lambda **k: nn.ConvTranspose2d(4, 3, 2, **k),
}


def linear():
    return nn.Linear(8, 4)


def bad(number):
    """A layer with such a number in its weight."""
    layer = linear()
    with torch.no_grad():
        layer.weight[0, 0] = number
    return layer


def table(rows, columns, **options):
    return partial(nn.Embedding, rows, columns, **options)


F32 = torch.float32
NOT_INT = "must be an int that divides"
REFUSED = [
    (table(9, 4, sparse=True), {}, "Embedding has sparse=True"),
    (table(9, 4, max_norm=0.5), {}, "Embedding has max_norm"),
    (partial(nn.EmbeddingBag, 9, 4, max_norm=2), {}, "EmbeddingBag has max_norm"),
    (table(4, 9, padding_idx=1), {}, "row 1 is padding, but can't be 0"),
    (table(4, 4, padding_idx=1), {}, "row 1 is padding, but can't be 0"),
    (table(8, 4, padding_idx=0), {"blocks": 2}, "row 0 is padding, but can't be 0"),
    (table(9, 4, padding_idx=0), {"manifold": "oblique"}, "row 0 is padding"),
    (table(4, 9, padding_idx=0), {"manifold": grassmann_torch, "transpose": True},
     "row 0 is padding"),
    (table(1, 9, padding_idx=0), {"manifold": "sphere"}, "row 0 is padding"),
    (partial(nn.LSTM, 5, 6), {}, "LSTM has no parameter 'weight'"),
    (lambda: nn.Sequential(nn.Linear(3, 4)), {"name": "0.weight"}, "no parameter"),
    (linear, {"name": 0}, "no parameter 0"),
    (partial(nn.LazyLinear, 4), {}, "has no shape before the first pass"),
    (linear, {"manifold": euclidean_torch}, "euclidean_torch constrains nothing"),
    (linear, {"manifold": "flat"}, "manifold is 'flat', but must be stiefel, obl"),
    (linear, {"manifold": stiefel_torch((8, 4))}, "but must be stiefel, oblique"),
    (linear, {"manifold": nn.Linear}, "but must be stiefel, oblique, sphere or a cl"),
    (linear, {"manifold": None}, "manifold is None, but must be"),
    (linear, {"blocks": 3}, "blocks is 3, but must be an int that divides the 4 rows"),
    (linear, {"blocks": 2.0}, f"blocks is 2.0, but {NOT_INT}"),
    (linear, {"blocks": True}, f"blocks is True, but {NOT_INT}"),
    (linear, {"blocks": 0}, f"blocks is 0, but {NOT_INT}"),
    (linear, {"blocks": "2"}, f"blocks is '2', but {NOT_INT}"),
    (linear, {"blocks": 2, "manifold": grassmann_torch}, "grassmann_torch takes no ba"),
    (linear, {"transpose": False}, "the columns of a 4 x 8 matrix can't be ort"),
    (linear, {"transpose": "yes"}, "transpose is 'yes', but must be True, False"),
    (linear, {"penalty_param": 0}, "penalty_param is 0, but must be above 0"),
    (linear, {"penalty_param": float("nan")}, "penalty_param is nan, but must be"),
    (linear, {"penalty_param": float("inf")}, "penalty_param is inf, but must be"),
    (linear, {"penalty_param": "1"}, "penalty_param is '1', but must be"),
    (linear, {"name": "bias"}, r"has shape \(4,\)"),
    (partial(nn.Linear, 0, 4), {}, r"has shape \(4, 0\)"),
    (partial(nn.Linear, 8, 4, dtype=torch.complex64), {}, "is torch.complex64"),
    (lambda: linear().to(torch.float8_e4m3fn), {}, "is torch.float8_e4m3fn"),
    (partial(bad, float("nan")), {}, "'weight' of Linear: the weight is not finite"),
    (partial(bad, float("inf")), {}, "'weight' of Linear: the weight is not finite"),
    (partial(bad, float("-inf")), {"manifold": "oblique"}, "is not finite"),
]  # fmt: skip
CELLS = [nn.RNNCell, nn.GRUCell, nn.LSTMCell]
RECURRENT = [nn.RNN, nn.GRU, nn.LSTM]
OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bias": False},
]


def dissolved(kind="wide", **options):
    return constraints.dissolve(LAYERS[kind](**F64), **options)


def off(weight):
    """‖C‖ of the short side, by the formula."""
    w = weight.flatten(1)
    gram = w.mT @ w if w.shape[0] >= w.shape[1] else w @ w.mT
    return (gram - torch.eye(len(gram), dtype=gram.dtype)).norm().item()


def inputs(kind):
    if kind == "bilinear":
        return torch.randn(3, 3, **F64), torch.randn(3, 4, **F64)
    if kind == "embedding":
        return (torch.tensor([[0, 2, 5], [8, 2, 1]]),)
    shape = {"tall": (3, 4), "wide": (3, 8), "square": (3, 5), "conv2d": (2, 2, 4, 4),
             "transposed": (2, 4, 3, 3)}[kind]  # fmt: skip
    return (torch.randn(shape, **F64),)


class TestDissolve:
    @pytest.mark.parametrize("kind", LAYERS)
    def test_computes_with_the_mapped_weight(self, kind):
        layer, plain = dissolved(kind), LAYERS[kind](**F64)
        assert off(free(layer)) < 1e-12
        w = free(move_(layer, 1.05)).detach().clone().requires_grad_()
        matrix = w.flatten(1)
        mapped, distance = constraints.stiefel_map(matrix)
        state = {**dict(layer.named_parameters()), "weight": mapped.view_as(w)}
        state.pop("parametrizations.weight.original")
        x = inputs(kind)
        expected = functional_call(plain, state, x)
        output = layer(*x)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
        (output.square().sum() + constraints.penalty(layer)).backward()
        (gradient,) = torch.autograd.grad(expected.square().sum() + 0.1 * distance, w)
        torch.testing.assert_close(free(layer).grad, gradient, rtol=1e-11, atol=1e-12)

    @pytest.mark.parametrize("kind", LAYERS)
    @pytest.mark.parametrize("manifold", constraints.MANIFOLDS)
    def test_parameters_stay_what_they_were(self, kind, manifold):
        layer = LAYERS[kind](**F64)
        before = list(layer.parameters())
        constraints.dissolve(layer, manifold=manifold)
        assert {id(p) for p in layer.parameters()} == {id(p) for p in before}
        assert all(type(p) is nn.Parameter for p in layer.parameters())
        assert not list(layer.buffers())
        assert constraints.feasibility(layer).weight < 1e-12

    @pytest.mark.parametrize(("make", "options", "message"), REFUSED)
    def test_refuses_in_one_line_and_leaves_the_layer_alone(
        self, make, options, message
    ):
        layer = make()
        before, kind = copy.deepcopy(layer.state_dict()), type(layer)
        with pytest.raises(ValueError, match=message) as caught:
            constraints.dissolve(layer, **options)
        assert "\n" not in str(caught.value) and type(layer) is kind
        if not isinstance(layer, nn.LazyLinear):  # which has no numbers yet
            same = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(layer.state_dict(), before, **same)

    def test_refuses_a_second_time(self):
        with pytest.raises(ValueError, match="'weight' of .* is parametrized already"):
            constraints.dissolve(dissolved())
        with pytest.raises(ValueError, match="has no weight_hh that is still free"):
            constraints.dissolve_recurrent(lstm())

    @pytest.mark.parametrize(
        "name", ["symp_stiefel", "hyperbolic", "stiefel_range_constraint"]
    )
    def test_refuses_a_manifold_without_a_projection(self, name):
        layer = nn.Linear(8, 8, **F64)
        before = layer.weight.detach().clone()
        with pytest.raises(ValueError, match="no projection of a weight of shape"):
            make = getattr(cdopt.manifold_torch, f"{name}_torch")
            constraints.dissolve(layer, manifold=make)
        assert not parametrize.is_parametrized(layer)
        assert torch.equal(layer.weight, before)

    @pytest.mark.parametrize("name", ["grassmann", "generalized_stiefel"])
    def test_takes_other_manifolds_of_tall_matrices(self, name):
        make = getattr(cdopt.manifold_torch, f"{name}_torch")
        tall = constraints.dissolve(nn.Linear(4, 8, **F64), manifold=make)
        turned = constraints.dissolve(
            nn.Linear(8, 4, **F64), manifold=make, transpose=True
        )
        for layer in tall, turned:
            assert constraints.feasibility(layer).weight < 1e-12

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_dtypes(self, dtype):
        eps = torch.finfo(dtype).eps
        layer = constraints.dissolve(nn.Linear(8, 4, dtype=dtype))
        assert layer.weight.dtype == dtype
        assert constraints.penalty(layer).dtype == torch.promote_types(dtype, F32)
        assert constraints.feasibility(layer).weight < 20 * eps
        for other in torch.float64, torch.bfloat16, torch.float32:
            layer.to(other)
            assert layer(torch.randn(3, 8, dtype=other)).dtype == other
            assert constraints.penalty(layer).dtype == torch.promote_types(other, F32)


class TestRecurrent:
    @pytest.mark.parametrize("kind", RECURRENT)
    @pytest.mark.parametrize("options", OPTIONS)
    @pytest.mark.parametrize("per_gate", [False, True])
    def test_computes_as_a_plain_one_with_the_mapped_weights(
        self, kind, options, per_gate
    ):
        rnn, plain = kind(5, 6, **options, **F64), kind(5, 6, **options, **F64)
        constraints.dissolve_recurrent(rnn, per_gate=per_gate)
        names = rnn._flat_weights_names
        assert list(rnn.parametrizations) == [n for n in names if "weight_hh" in n]
        for name in rnn.parametrizations:
            weight = getattr(rnn, name)
            gates = weight.chunk(len(weight) // 6) if per_gate else [weight]
            assert max(map(off, gates)) < 1e-12
        with torch.no_grad():
            for name in names:
                getattr(plain, name).copy_(getattr(rnn, name))
        x = torch.randn(3, 3, 5, **F64)
        first = options.get("batch_first", False)
        packed = pack_padded_sequence(x, [3, 2, 2], batch_first=first)
        assert torch.equal(rnn(x)[0], plain(x)[0])
        assert torch.equal(rnn(packed)[0].data, plain(packed)[0].data)

    @pytest.mark.parametrize("kind", CELLS)
    def test_cells(self, kind):
        for per_gate in False, True:
            cell = constraints.dissolve_recurrent(kind(5, 6, **F64), per_gate=per_gate)
            weight = cell.weight_hh
            for gate in weight.chunk(len(weight) // 6) if per_gate else [weight]:
                assert off(gate) < 1e-12
            state = cell(torch.randn(2, 5, **F64))
            (state[0].sum() + constraints.penalty(cell)).backward()
            assert free(cell, "weight_hh").grad is not None

    def test_each_map_is_computed_once_a_pass(self, monkeypatch):
        calls, map_of = [], Dissolved.forward
        monkeypatch.setattr(
            Dissolved, "forward", lambda *args: calls.append(1) or map_of(*args)
        )
        rnn = lstm(num_layers=2)
        for _ in range(2):  # training, then evaluation
            calls.clear()
            rnn(torch.randn(4, 3, 5, **F64))
            assert len(calls) == 2
            rnn.eval()


@pytest.mark.parametrize("sizes", [(5, 8), (8, 5), (5, 6, 2)])
def test_equals_cdopts_own_layer(sizes):
    """A linear one that widens or narrows, and an LSTM."""
    kind = LSTM_cdopt if len(sizes) == 3 else Linear_cdopt
    theirs = kind(*sizes, manifold_class=stiefel_torch, penalty_param=0.1, **F64)
    if len(sizes) == 3:
        ours = constraints.dissolve_recurrent(nn.LSTM(*sizes, **F64), per_gate=False)
    else:
        ours = constraints.dissolve(nn.Linear(*sizes, **F64))
    pairs = []
    for name, yours in theirs.named_parameters():
        if yours.requires_grad:  # which CDOpt's identity does not
            is_free = name in ours.parametrizations
            mine = free(ours, name) if is_free else getattr(ours, name)
            pairs.append((mine, yours))
    with torch.no_grad():
        for mine, yours in pairs:
            mine.copy_(yours.mul_(1.02))
    outputs, x = [], torch.randn(7, 3, sizes[0], **F64)
    for layer in ours, theirs:
        output = layer(x)
        outputs.append(output[0] if isinstance(output, tuple) else output)
        penalty = constraints.penalty if layer is ours else get_quad_penalty
        (outputs[-1].square().sum() + penalty(layer)).backward()
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-13)
    for mine, yours in pairs:
        torch.testing.assert_close(mine.grad, yours.grad, rtol=1e-11, atol=1e-13)


def test_a_weight_that_layers_share_is_dissolved_in_each():
    model = nn.Sequential(nn.Embedding(7, 3, **F64), nn.Linear(3, 7, **F64))
    model[1].weight = model[0].weight
    for layer in model:
        constraints.dissolve(layer, penalty_param=0.3)
    weight = free(move_(model)[0])
    assert torch.equal(model[0].weight, model[1].weight)
    alone = 0.3 * (weight.T @ weight - torch.eye(3, **F64)).square().sum()
    torch.testing.assert_close(constraints.penalty(model), alone)


def test_a_dissolved_layer_is_exported():
    exported = torch.export.export(layer := dissolved(), (torch.ones(2, 8, **F64),))
    found = exported.module()(torch.ones(2, 8, **F64))
    torch.testing.assert_close(found, layer(torch.ones(2, 8, **F64)))
