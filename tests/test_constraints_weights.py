"""What becomes of W: padding, sharing, assignment, resets, storage, precision."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from constrained import F64, dissolved, drawn, free, move_
from test_constraints_torch import CASES, build, each_case, name_of, output
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrizations import orthogonal

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints import Constraints

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2),
    "Rprop": partial(torch.optim.Rprop, lr=1e-2),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "Muon": partial(torch.optim.Muon, lr=1e-2),
}
TABLES = {
    "stiefel": {},
    "blocks": {"blocks": 2},
    "unit columns": {"manifold": "oblique", "transpose": True},
    "sphere": {"manifold": "sphere"},
}


class TestPadding:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("on", TABLES)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_the_row_is_0_and_stays_0(self, optimizer, on, dtype):
        torch.manual_seed(0)
        table = constraints.dissolve(
            nn.Embedding(24, 5, padding_idx=3, dtype=dtype), **TABLES[on]
        )
        moves = OPTIMIZERS[optimizer](table.parameters())
        for _ in range(5):
            tokens = torch.randint(0, 24, (8, 6))
            tokens[:, 4:] = 3
            moves.zero_grad()
            (
                table(tokens).sum(1).float().sin().sum() + constraints.penalty(table)
            ).backward()
            assert not free(table).grad[3].any() and free(table).grad.any()
            moves.step()
        table.weight = torch.randn(24, 5, dtype=dtype)
        assert not free(table)[3].any() and not table.weight[3].any()
        constraints.project_(move_(table))
        assert not free(table)[3].any()

    def test_a_shared_table(self):
        """The head has no padding row; whichever comes first, the table's stays 0."""
        for reverse in False, True:
            model = Tied()
            model.table.padding_idx = 2
            layers = [model.head, model.table] if reverse else [model.table, model.head]
            for layer in layers:
                constraints.dissolve(layer)
            move_(model, 1.3)
            with torch.no_grad():
                free(model.table)[2] = 0.5
            constraints.project_(nn.ModuleList(layers))
            assert not free(model.table)[2].any()

    def test_a_module_of_ones_own_has_no_padding_row(self):
        class Own(nn.Module):
            padding_idx, sparse, max_norm = 1, True, 0.5

            def __init__(self):
                super().__init__()
                self.proj = nn.Parameter(torch.randn(8, 4))

        assert constraints.dissolve(Own(), "proj").proj[1].any()

    def test_a_bag_never_reads_the_row(self):
        for options in {}, {"manifold": "oblique"}, {"manifold": "sphere"}:
            bag = constraints.dissolve(nn.EmbeddingBag(4, 9, padding_idx=2), **options)
            assert constraints.feasibility(bag).weight < 1e-6


class Tied(nn.Module):
    """A language model whose head is its table."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3, **F64), nn.Linear(3, 7, **F64)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.table(tokens))


class Names(nn.Module):
    """One weight with two names."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Parameter(torch.randn(4, 8, **F64))
        self.dec = self.enc


class TestShared:
    @pytest.mark.parametrize("layers", [["table", "head"], ["head", "table"]])
    def test_is_dissolved_in_each_layer_and_counts_once(self, layers):
        model = Tied()
        for name in layers:
            constraints.dissolve(getattr(model, name), penalty_param=0.3)
        w = free(move_(model).table)
        assert free(model.head) is w
        right = 0.3 * (w.mT @ w - torch.eye(3, **F64)).square().sum()
        torch.testing.assert_close(constraints.penalty(model), right)

    @pytest.mark.parametrize(
        "ask",
        [
            Constraints,
            constraints.penalty,
            constraints.feasibility,
            constraints.project_,
        ],
    )
    @pytest.mark.parametrize("one, other", [("table", "head"), ("head", "table")])
    def test_half_dissolved_is_refused(self, ask, one, other):
        model = Tied()
        constraints.dissolve(getattr(model, one))
        line = f"^{other}.weight is the weight of {one}.weight, which is dissolved: dis"
        with pytest.raises(ValueError, match=line):
            ask(model)
        with pytest.raises(ValueError, match="^1.weight is the weight of 0.weight"):
            ask(getattr(model, one), getattr(model, other))

    @pytest.mark.parametrize(
        "options", [{"manifold": "oblique"}, {"penalty_param": 5.0}, {"blocks": 7}]
    )
    def test_two_rules_for_one_weight_are_refused(self, options):
        model = Tied()
        constraints.dissolve(model.table)
        constraints.dissolve(model.head, **options)
        with pytest.raises(
            ValueError, match="manifold or penalty_param is another one"
        ):
            constraints.penalty(model)

    @pytest.mark.parametrize("name", ["enc", "dec"])
    def test_all_names_in_a_layer_are_dissolved(self, name):
        layer = constraints.dissolve(Names(), name)
        assert set(layer.parametrizations) == {"enc", "dec"}
        assert free(move_(layer), "enc") is free(layer, "dec")
        assert torch.equal(layer.enc, layer.dec) and len(list(layer.parameters())) == 1
        assert len(constraints.feasibility(layer).layers) == 1

    @pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
    def test_a_layer_with_one_weight_for_both_directions(self, kind):
        rnn = kind(5, 6, bidirectional=True, **F64)
        rnn.weight_hh_l0_reverse = rnn.weight_hh_l0
        constraints.dissolve_recurrent(rnn)
        move_(rnn)
        assert torch.equal(rnn.weight_hh_l0, rnn.weight_hh_l0_reverse)
        assert len(constraints.feasibility(rnn).layers) == 1


class TestAssignment:
    @each_case
    def test_projects_in_place(self, case):
        layer, x, name = build(case)
        w, target = free(layer, name), drawn(free(layer, name).shape, 5)
        address = w.data_ptr()
        setattr(layer, name, target)
        assert free(layer, name) is w and w.data_ptr() == address
        again = constraints.dissolve(CASES[case][0](**F64), **CASES[case][2])
        setattr(again, name, target.requires_grad_())
        assert constraints.feasibility(layer).weight < 1e-12
        if CASES[case][2].get("manifold") is None and "blocks" not in CASES[case][2]:
            u, _, v = torch.linalg.svd(target.detach().flatten(1), full_matrices=False)
            torch.testing.assert_close(w, (u @ v).reshape(w.shape))

    @each_case
    def test_of_another_shape_or_not_finite_is_refused(self, case):
        layer, _, name = build(case)
        before = free(layer, name).detach().clone()
        for value, line in [
            (torch.cat([before, before]), "has shape .*, but what is assigned has"),
            (before[..., :1], "has shape .*, but what is assigned has"),
            (before * math.nan, f"^'{name}' of .*: the weight is not finite$"),
            (before / 0, f"^'{name}' of .*: the weight is not finite$"),
            (None, f"^'{name}' of .* has to be a tensor of floats"),
            (before.tolist(), f"^'{name}' of .* has to be a tensor of floats"),
            (before.long(), f"^'{name}' of .* has to be a tensor of floats"),
            (before.to("meta"), f"^'{name}' of .* has to be a tensor of floats"),
        ]:
            with pytest.raises(ValueError, match=line):
                setattr(layer, name, value)
            assert torch.equal(free(layer, name), before)

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_not_projected(self, number):
        model = nn.Sequential(move_(dissolved()), dissolved())
        with torch.no_grad():
            free(model[1])[0, 0] = number
        before = free(model[0]).detach().clone()
        with pytest.raises(ValueError, match="^1.weight: the weight is not finite"):
            constraints.project_(model)
        assert torch.equal(free(model[0]), before)
        rnn = nn.LSTM(5, 6, 2)
        with torch.no_grad():
            rnn.weight_hh_l1[0, 0] = number
        with pytest.raises(
            ValueError, match="'weight_hh_l1' of LSTM: the weight is no"
        ):
            constraints.dissolve_recurrent(rnn)
        assert type(rnn) is nn.LSTM  # none of several


class TestReset:
    @each_case
    def test_initialises_and_projects(self, case):
        layer, x, name = build(case)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(math.nan)  # stands for what memory holds
        torch.manual_seed(3)
        layer.reset_parameters()
        plain = CASES[case][0](**F64)
        torch.manual_seed(3)
        plain.reset_parameters()
        constraints.dissolve(plain, **CASES[case][2])
        if isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):  # draw in another order
            assert constraints.feasibility(layer).weight < 1e-12
        else:
            torch.testing.assert_close(layer.state_dict(), plain.state_dict())
        copied = copy.deepcopy(layer)
        copied.reset_parameters()
        assert not torch.equal(free(copied, name), free(layer, name))
        assert output(layer, x).isfinite().all()

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_class_that_resets_something_else_or_nothing(self, fails):
        class OnlyBias(nn.Linear):
            made = False

            def reset_parameters(self):
                if self.made and fails:
                    raise RuntimeError("not again")
                nn.init.zeros_(self.bias)
                if not self.made:
                    super().reset_parameters()

        layer = constraints.dissolve(OnlyBias(8, 4, **F64))
        layer.made, before = True, layer.weight.detach().clone()
        with pytest.raises(RuntimeError) if fails else nullcontext():
            layer.reset_parameters()
        torch.testing.assert_close(layer.weight, before, rtol=1e-12, atol=1e-13)

    def test_the_last_write_wins_however_it_reaches_the_weight(self):
        class Eyes(nn.LSTM):
            def reset_parameters(self):
                super().reset_parameters()  # by way of parameters()
                for gate in self.weight_hh_l0.chunk(4):
                    nn.init.eye_(gate.data)

        rnn = constraints.dissolve_recurrent(Eyes(5, 6, **F64))
        nn.init.normal_(free(rnn, "weight_hh_l0"))
        rnn.reset_parameters()
        expected = torch.eye(6, **F64).repeat(4, 1)
        torch.testing.assert_close(rnn.weight_hh_l0.detach(), expected)

    def test_other_parametrizations_on_top(self):
        layer = constraints.dissolve(nn.Linear(8, 4, **F64))
        parametrizations.spectral_norm(layer)
        with torch.no_grad():
            free(layer).fill_(math.nan)
        layer.reset_parameters()
        assert layer.weight.isfinite().all()
        assert constraints.feasibility(layer).weight < 1e-12

    def test_disturbs_no_other_thread(self):
        """One layer is reset again and again while another one is trained."""
        restless, layer = nn.Linear(16, 16), dissolved()
        constraints.dissolve(restless)
        with ThreadPoolExecutor(1) as pool:
            resets = pool.submit(
                lambda: [restless.reset_parameters() for _ in range(300)]
            )
            while not resets.done():
                w = free(move_(layer, 1.001)).detach()
                mapped = 1.5 * w - 0.5 * w @ w.mT @ w
                torch.testing.assert_close(layer.weight.detach(), mapped)
                layer.weight = w
            resets.result()

    @pytest.mark.parametrize(
        "kind", [nn.MultiheadAttention, nn.TransformerEncoderLayer]
    )
    def test_attention(self, kind):
        layer = kind(12, 3, **F64)
        attention = getattr(layer, "self_attn", layer)
        constraints.dissolve(attention, "in_proj_weight", blocks=9)
        with torch.no_grad():
            free(attention, "in_proj_weight").fill_(math.nan)
        attention._reset_parameters()
        assert constraints.feasibility(layer).weight < 1e-12

    def test_a_model_that_is_made_on_meta(self):
        with torch.device("meta"):
            model = nn.Sequential(
                constraints.dissolve(nn.Embedding(9, 6, padding_idx=1)),
                constraints.dissolve(nn.Linear(6, 4)),
                constraints.dissolve(nn.Linear(4, 4), manifold="oblique"),
            )
            model[1].reset_parameters()  # there is nothing to initialise
        model.to_empty(device="cpu")
        model.apply(lambda m: getattr(m, "reset_parameters", lambda: None)())
        assert constraints.feasibility(model).weight < 1e-5
        assert not model[0].weight[1].any()


class TestPlaces:
    """Memory, modes and devices."""

    def test_memory_that_is_shared_or_laid_out(self):
        layer = nn.Linear(8, 4)
        layer.share_memory()
        flat = torch.zeros(32)
        view = nn.Linear(8, 4)
        view.weight = nn.Parameter(flat.view(4, 8).copy_(view.weight.detach()))
        conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        for each in layer, view, conv:
            constraints.dissolve(each)
        for _ in range(2):
            assert free(layer).is_shared()
            assert torch.equal(flat.view(4, 8), free(view))
            assert free(conv).is_contiguous(memory_format=torch.channels_last)
            layer.weight, view.weight = torch.randn(4, 8), torch.randn(4, 8)
            conv.weight = torch.randn(6, 4, 3, 3)
            conv.reset_parameters()
            constraints.project_(nn.ModuleList([layer, view, conv]))

    @pytest.mark.parametrize("place", [
        torch.randn(20).as_strided((4, 8), (1, 1)), torch.randn(1, 8).expand(4, 8),
    ])  # fmt: skip
    def test_memory_that_overlaps_is_left(self, place):
        layer = nn.Module()
        layer.weight = nn.Parameter(place)
        constraints.dissolve(layer)
        assert constraints.feasibility(layer).weight < 1e-5

    @each_case
    def test_inference_mode(self, case):
        make, shape, options = CASES[case]
        with torch.inference_mode():
            layer = constraints.dissolve(make(**F64), **options)
            inside = output(layer, x := torch.randn(shape, **F64))
        layer.requires_grad_(False)
        torch.testing.assert_close(output(layer, x.clone()), inside)
        constraints.penalty(layer)
        assert constraints.feasibility(layer).weight < 1e-12

    @each_case
    def test_fake_tensors_decide_nothing_that_needs_data(self, case):
        make, shape, options = CASES[case]
        with FakeTensorMode():
            layer = constraints.dissolve(make(**F64), **options)
            output(layer, torch.randn(shape, **F64)).sum().backward()
            setattr(layer, name_of(case), free(layer, name_of(case)).clone())
            layer.reset_parameters()
            constraints.penalty(layer).backward()
            constraints.project_(layer)

    def test_one_layer_in_many_threads(self):
        """Each gets the gradients of its own input, of recurrent layers, too."""
        for case in "wide", "lstm", "rnn":
            layer, x, _ = build(case)
            weights, inputs = list(layer.parameters()), [x + i for i in range(6)]

            def work(x, layer=layer, weights=weights):
                loss = output(layer, x).square().sum() + constraints.penalty(layer)
                return torch.autograd.grad(loss, weights)

            expected = [work(x) for x in inputs]
            with ThreadPoolExecutor(4) as pool:
                for found, right in zip(
                    pool.map(work, inputs * 5), expected * 5, strict=True
                ):
                    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
    def test_recurrent_layers_within_each_other(self, kind):
        class Two(kind):
            def __init__(self):
                super().__init__(5, 5, **F64)
                self.inner = constraints.dissolve_recurrent(kind(5, 5, **F64))

            def forward(self, x, h=None):
                return super().forward(self.inner(self.inner(x)[0])[0], h)

        two, x = Two(), torch.randn(3, 2, 5, **F64)
        expected = two(x)[0]
        two.weight_hh_l0.data.copy_(
            constraints.dissolve_recurrent(copy.deepcopy(two)).weight_hh_l0
        )
        expected = two(x)[0]
        constraints.dissolve_recurrent(two)
        torch.testing.assert_close(two(x)[0], expected)
        with pytest.raises(RuntimeError, match="input.size"):
            two(torch.randn(3, 2, 4, **F64))
        torch.testing.assert_close(two(x)[0], expected)  # nothing is left of the error


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_penalty_is_at_least_of_float32(self, dtype):
        layer = constraints.dissolve(nn.Linear(512, 512, dtype=dtype))
        with torch.no_grad():
            free(layer).mul_(4)
        assert constraints.penalty(layer).item() == pytest.approx(11520, rel=0.02)

    def test_the_order_of_layers_does_not_matter(self):
        layers = [
            move_(constraints.dissolve(nn.Linear(8, 4, dtype=dtype)))
            for dtype in (torch.float64, torch.float16, torch.float32)
        ]
        found = [
            constraints.penalty(nn.ModuleList(order))
            for order in (layers, layers[::-1], layers[1:] + layers[:1])
        ]
        assert {each.dtype for each in found} == {torch.float64}
        torch.testing.assert_close(found[1:], found[:1] * 2)

    @pytest.mark.parametrize("manifold", constraints.MANIFOLDS)
    def test_a_weight_that_is_feasible_already_stays_as_it_is(self, manifold):
        for dtype in torch.float32, torch.bfloat16:
            layer = constraints.dissolve(
                nn.Linear(64, 32, dtype=dtype), manifold=manifold
            )
            before = free(layer).detach().clone()
            layer.weight = before
            assert torch.equal(free(layer), before)

    @pytest.mark.parametrize("size", [1e-9, 1e-4, 1e-2, 0.2, 3.0])
    def test_the_nearest_is_the_polar_factor_however_far(self, size):
        """Close to the manifold by products, elsewhere by an SVD."""
        for shape in (40, 12), (12, 40), (15, 15), (3, 14, 6):
            w = nn.init.orthogonal_(torch.empty(shape[-2:], **F64))
            w = w.expand(shape) + size * drawn(shape, 1)
            on = constraints.surface.surface(
                "stiefel", w.flatten(0, -2), math.prod(shape[:-2])
            )
            u, _, v = torch.linalg.svd(w, full_matrices=False)
            found = on.nearest(w.flatten(0, -2)).reshape(shape)
            torch.testing.assert_close(found, u @ v, rtol=1e-11, atol=1e-12)


def test_dissolving_does_to_a_layer_what_torch_does():
    """Names, gradients and class, beside torch's own parametrization."""
    ours, theirs = dissolved(), orthogonal(nn.Linear(8, 4, **F64))
    assert ours.state_dict().keys() == {"bias", "parametrizations.weight.original"}
    assert type(ours).__name__ == type(theirs).__name__
    assert type(ours).__mro__[1:] == type(theirs).__mro__[1:]
    F.linear(torch.ones(1, 8, **F64), ours.weight).sum().backward()
    assert free(ours).grad is not None
