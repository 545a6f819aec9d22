"""W and what is said of it: what is refused, padding, sharing, penalty, projection."""

import copy
import math
import warnings
from functools import partial
from unittest import mock

import cdopt.nn as theirs
import pytest
import torch
from cdopt.manifold_torch import oblique_torch, stiefel_torch
from constrained import CASES, F64, ROWS, SPHERE, dissolved, drawn, free, move_, near
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from cdopt_tutorial import constraints
from cdopt_tutorial.calls.references import reference
from cdopt_tutorial.constraints import Constraints
from cdopt_tutorial.constraints import dissolved as dissolving
from cdopt_tutorial.constraints.manifolds import Oblique, Stiefel, manifold_of
from cdopt_tutorial.constraints.sums import Sums

STIEFEL = {"manifold_class": stiefel_torch, "penalty_param": 0.3, **F64}
COLUMNS = ROWS | {"transpose": True}
wide = CASES["wide"].formula


def table(rows, columns, **options):
    return partial(nn.Embedding, rows, columns, **options)


def linear(**options):
    return nn.Linear(8, 4, **options)


def bad():
    layer = linear()
    layer.weight.data[0, 0] = -math.inf
    return layer


PADS = "row 0 of 'weight' of Embedding is padding: can't be 0"


def overlapping():
    layer = linear()
    layer.weight = nn.Parameter(torch.randn(11).as_strided((4, 8), (1, 0)))
    return layer


REFUSED = [
    (table(9, 4, sparse=True), {}, "Embedding has sparse=True"),
    (partial(nn.EmbeddingBag, 9, 4, max_norm=2), {}, "EmbeddingBag has max_norm"),
    (table(4, 9, padding_idx=0), {}, PADS),
    (table(9, 4, padding_idx=0), ROWS, PADS),
    (table(1, 9, padding_idx=0), SPHERE, PADS),
    (partial(nn.LSTM, 5, 6), {}, "LSTM has no free parameter 'weight': it has"),
    (dissolved, {}, "has no free parameter 'weight': it has bias"),
    (linear, {"manifold": "flat"}, "manifold is 'flat', but must be one of stiefel"),
    (linear, {"blocks": 3}, "blocks is 3, but must be an int that divides the 4 rows"),
    (linear, {"blocks": 2.0}, "blocks is 2.0, but must be an int that divides"),
    (linear, {"transpose": True}, "transpose is True, but must be False"),
    (linear, {"penalty_param": 0}, "penalty_param is 0, but must be above 0"),
    (linear, ROWS | {"transpose": 1}, "transpose is 1, but must be False"),
    (linear, {"penalty_param": math.inf}, "penalty_param is inf, but must be"),
    (linear, {"penalty_param": True}, "penalty_param is True, but must be"),
    (linear, {"penalty_param": "1"}, "penalty_param is '1', but must be"),
    (linear, {"blocks": 0}, "blocks is 0, but must be an int that divides"),
    (partial(nn.Linear, 0, 4), {}, r"has shape \(4, 0\)"),
    (overlapping, {}, "has elements that share memory"),
    (linear, {"name": "bias"}, r"has shape \(4,\)"),
    (partial(linear, dtype=torch.complex64), {}, "is torch.complex64"),
    (lambda: linear().to(torch.float8_e4m3fn), {}, "is torch.float8_e4m3fn"),
    (bad, ROWS, "'weight' of Linear is not finite"),
]


class TestRefused:
    @pytest.mark.parametrize(("make", "options", "message"), REFUSED)
    def test_in_one_line_and_the_layer_stays_as_it_was(self, make, options, message):
        layer = make()
        kind, before = type(layer), copy.deepcopy(dict(layer.state_dict()))
        with pytest.raises(ValueError, match=message) as caught:
            constraints.dissolve(layer, **options)
        assert "\n" not in str(caught.value) and type(layer) is kind
        same = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(dict(layer.state_dict()), before, **same)

    def test_recurrent_layers(self):
        """And none of several weights is dissolved if one can't be."""
        rnn, shared = nn.LSTM(5, 6, 2), nn.LSTM(5, 6, 2)
        nn.init.constant_(rnn.weight_hh_l1, math.nan)
        shared.weight_hh_l1 = nn.Parameter(torch.randn(24, 1).expand(24, 6))
        for layer, line in (
            (rnn, "'weight_hh_l1' of LSTM is not finite"),
            (shared, "'weight_hh_l1' of LSTM has elements that share memory"),
            (nn.Linear(3, 3), "Linear has no weight_hh that is still free"),
            (constraints.dissolve_recurrent(nn.RNN(5, 6)), "has no weight_hh that is"),
        ):
            with pytest.raises(ValueError, match=line):
                constraints.dissolve_recurrent(layer)
        assert type(rnn) is type(shared) is nn.LSTM

    @pytest.mark.filterwarnings("ignore")  # of CDOpt's
    def test_models(self):
        for model, line in (
            ([dissolved()], "a list is no model: give modules"),
            (reference(nn.LSTM(3, 3)), "no weight of this model is constrained"),
            (theirs.LSTM_cdopt(3, 4, **STIEFEL), "LSTM_cdopt is CDOpt's: dissolve a"),
        ):
            with pytest.raises(ValueError, match=line):
                Constraints(model)


class TestPadding:
    @pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Muon])
    @pytest.mark.parametrize("options", [{}, {"blocks": 2}, COLUMNS, SPHERE])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_the_row_is_0_and_stays_0(self, optimizer, options, dtype):
        embedding = nn.Embedding(24, 5, padding_idx=3, dtype=dtype)
        constraints.dissolve(embedding, **options)
        moves = optimizer(embedding.parameters(), lr=1e-2)
        for _ in range(5):
            tokens = torch.randint(0, 24, (8, 6))
            tokens[:, 4:] = 3
            moves.zero_grad()
            loss = embedding(tokens).sum(1).float().sin().sum()
            (loss + constraints.penalty(embedding)).backward()
            assert not free(embedding).grad[3].any() and free(embedding).grad.any()
            moves.step()
        embedding.weight = torch.randn(24, 5, dtype=dtype)
        assert not free(embedding)[3].any() and not embedding.weight[3].any()
        constraints.project_(move_(embedding))
        assert not free(embedding)[3].any()

    @pytest.mark.parametrize("options", [{}, ROWS, SPHERE])
    def test_a_bag_never_reads_the_row(self, options):
        layer = nn.EmbeddingBag(4, 9, padding_idx=1)
        constraints.dissolve(layer, **options)
        assert constraints.feasibility(layer).weight < 1e-6


class Tied(nn.Module):
    """A language model whose head is its table."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(7, 3, **options, **F64)
        self.head = nn.Linear(3, 7, **F64)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("order", [["table", "head"], ["head", "table"]])
class TestShared:
    def test_is_dissolved_in_each_layer_and_counts_once(self, order):
        model = Tied(padding_idx=2)
        one, other = (getattr(model, name) for name in order)
        constraints.dissolve(one, penalty_param=0.3)
        line = "^head.weight is the weight of table.weight: dissolve it in both layers"
        with pytest.raises(ValueError, match=line):
            Constraints(model)
        with pytest.raises(ValueError, match="^1.weight is the weight of 0.weight"):
            Constraints(one, other)
        constraints.dissolve(other, penalty_param=0.3)
        w = free(move_(model).table)
        assert free(model.head) is w
        near(constraints.penalty(model), 0.3 * CASES["tall"].formula(w)[1])
        # The head has no padding row, but the table's stays 0.
        nn.init.constant_(w[2], 0.5)
        constraints.project_(one, other)
        assert not w[2].any()

    @pytest.mark.parametrize("options", [ROWS, {"penalty_param": 5.0}])
    def test_two_rules_for_one_weight_are_refused(self, order, options):
        model = Tied()
        constraints.dissolve(getattr(model, order[0]))
        constraints.dissolve(getattr(model, order[1]), **options)
        with pytest.raises(ValueError, match="head.weight is the weight of table.weig"):
            constraints.penalty(model)


def test_all_names_of_a_weight_in_a_layer_are_dissolved():
    layer, names = nn.GRU(5, 6, bidirectional=True, **F64), ["", "_reverse"]
    layer.weight_hh_l0_reverse = layer.weight_hh_l0
    constraints.dissolve_recurrent(layer)
    move_(layer)
    one, other = (getattr(layer, f"weight_hh_l0{end}") for end in names)
    assert torch.equal(one, other) and len(layer.parametrizations) == 2
    assert len(constraints.feasibility(layer).layers) == 1


def replace_layer(model):
    model[0] = move_(dissolved(), 1.3)


def assign(model):
    scaled = {name: 1.2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(scaled, assign=True)


WRITERS = {
    "assign": assign,
    "data": lambda model: setattr(free(model[0]), "data", 1.2 * free(model[0]).data),
    "a new layer": replace_layer,
    "another is dissolved": lambda model: constraints.dissolve(model[2]),
    "meta": lambda model: move_(model.to("meta").to_empty(device="cpu"), 0.0),
}


class TestPenalty:
    @pytest.mark.parametrize("writer", WRITERS)
    def test_is_of_the_weights_that_the_model_has(self, writer):
        model = move_(nn.Sequential(dissolved(), nn.Tanh(), nn.Linear(4, 3, **F64)))
        kept = Constraints(model)
        kept.with_penalty(lambda: model(drawn((2, 8), 0)).sum())[0].backward()
        WRITERS[writer](model)
        model.zero_grad()
        found = kept.penalty()
        found.backward()
        layers = [layer for layer in model if parametrize.is_parametrized(layer)]
        ws = [free(layer).detach().requires_grad_() for layer in layers]
        expected = sum(0.1 * wide(w)[1] for w in ws)
        near(found, expected)
        near([free(x).grad for x in layers], list(torch.autograd.grad(expected, ws)))
        kept.project_()
        assert constraints.feasibility(model).weight < 1e-6
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight")
        with pytest.raises(ValueError, match="no weight of this model is constrained"):
            kept.penalty()

    def test_shares_one_sum_with_a_pass(self, monkeypatch):
        """Values and gradients are those of two."""
        again, x = dissolved(4, 4, manifold="oblique"), drawn((2, 8), 0)
        model = move_(nn.Sequential(dissolved(), again, nn.Tanh(), again))
        expected = model(x).sum() + constraints.penalty(model)
        weights = list(model.parameters())
        gradients = torch.autograd.grad(expected, weights)
        # It would compute the sums once more.
        monkeypatch.setattr(dissolving, "squared_distances", lambda weights: [])
        found = sum(Constraints(model).with_penalty(lambda: model(x).sum()))
        near(found, expected)
        for _ in range(2):  # both graphs last as long as the user wants
            near(torch.autograd.grad(found, weights, retain_graph=True), gradients)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_of_a_checkpointed_pass_has_its_gradient(self, reentrant):
        layer, x = move_(dissolved()), drawn((2, 8), 0, requires_grad=True)
        kept, run = Constraints(layer), partial(checkpoint, use_reentrant=reentrant)
        gradients = []
        for losses in (
            kept.with_penalty(lambda: run(layer, x).sum()),
            (layer(x).sum(), kept.penalty()),
        ):
            layer.zero_grad()
            sum(losses).backward()
            gradients.append(free(layer).grad.clone())
        near(*gradients)


@pytest.mark.filterwarnings("ignore")  # of CDOpt's
@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (5, 5)])
@pytest.mark.parametrize("manifold", [stiefel_torch, oblique_torch])
def test_a_layer_of_cdopt_as_cdopt_itself_and_so_its_copy(shape, manifold):
    layer = theirs.Linear_cdopt(*shape, **STIEFEL | {"manifold_class": manifold})
    duplicate = copy.deepcopy(layer)
    with torch.no_grad():
        move_(layer).weight[0].mul_(1.5)  # so that rows and columns differ
    expected = theirs.get_quad_penalty(layer)
    near(constraints.penalty(layer), expected)
    assert constraints.feasibility(duplicate).weight < 1e-12
    duplicate.load_state_dict(layer.state_dict())
    constraints.project_(duplicate)
    assert constraints.feasibility(duplicate).weight < 1e-12
    near(theirs.get_quad_penalty(layer), expected, 0)


class TestProjection:
    def test_is_of_all_weights_or_none(self):
        model = move_(nn.Sequential(dissolved(), dissolved()))
        nn.init.constant_(free(model[1]), math.inf)
        before = free(model[0]).detach().clone()
        with pytest.raises(ValueError, match="^1.weight is not finite"):
            constraints.project_(model)
        assert torch.equal(free(model[0]), before)

    @pytest.mark.parametrize("factor", [0.5, 0.7, 1.3, 1.5])
    @pytest.mark.parametrize("manifold", constraints.MANIFOLDS)
    def test_a_change_by_far_is_not_silent(self, manifold, factor):
        """A row that is 0 stays so, and one of norm 2 is turned around by the map."""
        model = nn.Sequential(nn.Tanh(), dissolved(manifold=manifold))
        with torch.no_grad():
            rows = slice(None) if manifold == "sphere" else 2
            free(model[1])[rows] *= factor
        line = f"project_ moves 1.weight far: its singular value or norm {factor:.2g} "
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            constraints.project_(model)
        said = [str(warning.message) for warning in caught]
        assert said == ([] if 0.6 < factor < 1.4 else [f"{line}becomes 1"])

    def test_of_what_is_not_the_mapped_weight_is_refused(self):
        layer = parametrizations.spectral_norm(dissolved())
        for act in constraints.feasibility, constraints.project_:
            with pytest.raises(ValueError, match="^0.weight has another parametriz"):
                act(nn.Sequential(layer))

    @pytest.mark.parametrize("projected", [False, True])
    def test_a_float32_weight_is_measured_in_float64(self, projected):
        """In float32, rounding alone would change either by about 1e-4."""
        layer = constraints.dissolve(nn.Linear(512, 256))
        if not projected:
            move_(layer, 1.001)
        mapped, off = wide(free(layer).detach().double())
        found = constraints.feasibility(layer)
        assert found.weight == pytest.approx(off.sqrt().item(), rel=1e-8)
        off = wide(mapped)[1].sqrt().item()
        assert found.mapped == pytest.approx(off, rel=1e-5, abs=1e-13)

    @pytest.mark.parametrize("manifold", constraints.MANIFOLDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_leaves_what_is_feasible_as_it_is(self, manifold, dtype):
        layer = nn.Linear(64, 32, dtype=dtype)
        constraints.dissolve(layer, manifold=manifold)
        before = free(layer).detach().clone()
        layer.weight = before
        assert torch.equal(free(layer), before)

    def test_keeps_memory_that_is_shared_or_laid_out(self):
        layer, view, flat = nn.Linear(8, 4), nn.Linear(8, 4), torch.zeros(32)
        layer.share_memory()
        view.weight = nn.Parameter(flat.view(4, 8).copy_(view.weight.detach()))
        conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        layers = nn.ModuleList(map(constraints.dissolve, (layer, view, conv)))
        for _ in range(2):
            assert free(layer).is_shared()
            assert torch.equal(flat.view(4, 8), free(view))
            assert free(conv).is_contiguous(memory_format=torch.channels_last)
            layer.weight, view.weight = torch.randn(4, 8), torch.randn(4, 8)
            conv.weight = torch.randn(6, 4, 3, 3)
            constraints.project_(layers)


def test_a_batch_is_mapped_matrix_by_matrix():
    x = drawn((3, 2, 9), 0)
    mapped, distance = constraints.stiefel_map(x)
    one_by_one = [constraints.stiefel_map(matrix) for matrix in x]
    near(mapped, torch.stack([each for each, _ in one_by_one]))
    near(distance, sum(each for _, each in one_by_one))
    near(constraints.stiefel_constraint(x).square().sum(), distance)


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1e-2, 0.2, 3.0])
@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (15, 15), (3, 14, 6)])
def test_the_nearest_is_the_polar_factor_however_far(size, shape):
    """Close to the manifold by products, elsewhere by an SVD."""
    w = nn.init.orthogonal_(torch.empty(shape[-2:], **F64))
    w = w.expand(shape) + size * drawn(shape, 1)
    stacked = w.flatten(0, -2)
    on = manifold_of("stiefel", stacked, math.prod(shape[:-2]))
    u, _, v = torch.linalg.svd(w, full_matrices=False)
    near(on.nearest(stacked).reshape(shape), u @ v)


def test_a_part_refuses_a_second_derivative():
    """A mesh without ranks: its sums are those of this process."""
    sums = Sums(mesh=mock.Mock(get_group=lambda dim: None), inner=(0,))
    x = drawn((4, 3), 0, requires_grad=True)
    with mock.patch("torch.distributed.all_reduce"):
        for manifold in Stiefel(), Oblique():
            total = sum(result.sum() for result in manifold.map_point(x, sums))
            with pytest.raises(RuntimeError, match="in shards has no second deriv"):
                torch.autograd.grad(total, x, create_graph=True)
