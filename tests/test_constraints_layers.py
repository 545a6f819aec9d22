"""Torch's own tools on dissolved layers of every kind: as on plain ones, and right."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest
import torch
from constrained import (
    CASES,
    F64,
    ROWS,
    dissolved,
    drawn,
    each_case,
    each_rnn,
    free,
    move_,
    near,
    not_rnns,
    output,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints.dissolved import Dissolved

LSTM = CASES["lstm"]


@each_case
def test_computes_and_is_penalised_by_the_formula(case):
    layer, x = case.build(1.0)
    assert constraints.feasibility(layer).weight < 1e-12
    assert {type(p) for p in layer.parameters()} == {nn.Parameter}
    w = case.w(move_(layer, 1.05)).detach().requires_grad_()
    found = output(layer, x), constraints.penalty(layer)
    expected = case.plain_output(layer, w, x), 0.1 * case.formula(w)[1]
    near(found, expected)
    (found[0].square().sum() + found[1]).backward()
    (expected[0].square().sum() + expected[1]).backward()
    near(case.w(layer).grad, w.grad)


class TestTransforms:
    """Of torch.func, and forward-mode AD: over the input, and over W."""

    def both(self, case):
        """The loss as a function of W, of the layer and of the plain one, and a W."""
        layer, x = case.build()
        onto = drawn(output(layer, x).shape, 1)

        def ours(w):
            return (output(layer, x, {case.key: w}) * onto).sum().tanh()

        def theirs(w):
            return (case.plain_output(layer, w, x) * onto).sum().tanh()

        return ours, theirs, case.w(layer).detach()

    @not_rnns
    def test_derivatives_of_every_order_over_the_weight(self, case):
        ours, theirs, w = self.both(case)
        near(grad(ours)(w), grad(theirs)(w))
        tangents = (drawn(w.shape, 2),)
        near(jvp(ours, (w,), tangents), jvp(theirs, (w,), tangents))
        expected = hessian(theirs)(w)
        for one, other in product((jacfwd, jacrev), repeat=2):
            near(one(other(ours))(w), expected)

    @not_rnns
    def test_over_the_input_and_over_an_ensemble(self, case):
        layer, x = case.build()
        call = partial(output, layer)
        near(jacfwd(call)(x), jacrev(call)(x))
        layers = layer, move_(copy.deepcopy(layer))
        found = vmap(partial(output, layer, x))(stack_module_state(layers)[0])
        near(found, torch.stack([output(one, x) for one in layers]))

    def test_of_recurrent_layers(self):
        ours, theirs, w = self.both(LSTM)
        near(grad(ours)(w), grad(theirs)(w))


class TestCopies:
    @each_case
    def test_copies_and_loaded_states_are_equal_and_separate(self, case):
        (layer, x), (loaded, _) = case.build(), case.build(1.0)
        before = output(layer, x)  # a pass's graph doesn't get in the way
        loaded.load_state_dict(layer.state_dict())
        copied = copy.deepcopy(layer)
        assert type(copied) is type(layer)
        for other in copied, loaded:
            near(output(other, x), before, 0)
            assert constraints.penalty(other) == constraints.penalty(layer) > 0
        before.sum().backward()
        assert all(p.grad is None for p in copied.parameters())
        move_(copied).reset_parameters()
        near(output(layer, x), before, 0)

    @each_case
    def test_removal_leaves_a_plain_layer(self, case):
        (layer, x), other = case.build(), case.plain()
        assert parametrize.type_before_parametrizations(layer) is type(other)
        expected, w = output(layer, x), case.w(layer)
        parametrize.remove_parametrizations(layer, case.name)
        assert type(layer) is type(other) and vars(layer).keys() == vars(other).keys()
        assert getattr(layer, case.name) is w
        near(output(layer, x), expected)
        sent = pickle.dumps(layer)
        assert b"cdopt_tutorial" not in sent
        near(output(pickle.loads(sent), x), expected)
        layer.load_state_dict(other.state_dict())
        near(output(layer, x), output(other, x), 0)
        assert constraints.feasibility(case.dissolve(layer)).weight < 1e-12

    @pytest.mark.parametrize("first", [True, False])
    def test_other_parametrizations_of_the_layer(self, first):
        """Removed in either order; in between, copies still work."""
        rnn, x = nn.LSTM(5, 6, **F64), torch.randn(4, 3, 5, **F64)
        parametrizations.weight_norm(rnn, "weight_ih_l0")
        constraints.dissolve_recurrent(rnn)
        rnn.reset_parameters()
        expected = move_(rnn)(x)[0]
        names = ["weight_ih_l0", "weight_hh_l0"]
        for name in names if first else reversed(names):
            near(copy.deepcopy(rnn)(x)[0], expected)
            parametrize.remove_parametrizations(rnn, name)
            near(rnn(x)[0], expected)
        assert type(rnn) is nn.LSTM


@each_case
def test_an_assignment_projects_in_place_or_is_refused(case):
    (layer, _), other = case.build(), case.plain()
    w, target = case.w(layer), drawn(case.w(layer).shape, 5)
    address = w.data_ptr()
    setattr(layer, case.name, target.requires_grad_())
    assert case.w(layer) is w and w.data_ptr() == address
    assert constraints.feasibility(layer).weight < 1e-12
    setattr(other, case.name, nn.Parameter(target))
    near(w, case.w(case.dissolve(other)))
    before = w.detach().clone()
    for value, line in [
        (torch.cat([before, before]), "has shape .*, but what is assigned is"),
        (before * math.nan, f"^'{case.name}' of .* is not finite$"),
        (before * 1j, f"^'{case.name}' of .* is real, but what is assigned"),
        (before / 0, f"^'{case.name}' of .* is not finite$"),
        (None, f"^'{case.name}' of .*, but what is assigned is <class"),
    ]:
        with pytest.raises(ValueError, match=line):
            setattr(layer, case.name, value)
        assert torch.equal(case.w(layer), before)


class TestReset:
    @each_case
    def test_initialises_and_projects(self, case):
        (layer, x), other = case.build(), case.plain()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(math.nan)  # stands for what memory holds
        for one in layer, other:
            torch.manual_seed(3)
            one.reset_parameters()
        assert constraints.feasibility(layer).weight < 1e-12
        assert output(layer, x).isfinite().all()
        if not isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):  # another order
            near(dict(layer.state_dict()), dict(case.dissolve(other).state_dict()))

    def test_a_class_with_a_reset_of_its_own(self):
        """The last write wins, however it reaches the weight; others stay as well."""

        class Eyes(nn.LSTM):
            def reset_parameters(self, bias=0.0):
                super().reset_parameters()  # by way of parameters()
                self.bias_hh_l0 = nn.Parameter(torch.full((24,), bias, **F64))
                for gate in self.weight_hh_l0.chunk(4):
                    nn.init.eye_(gate.data)

        rnn = constraints.dissolve_recurrent(Eyes(5, 6, **F64))
        nn.init.normal_(free(rnn, "weight_hh_l0"))
        rnn.reset_parameters(bias=7.0)
        near(rnn.weight_hh_l0.detach(), torch.eye(6, **F64).repeat(4, 1))
        assert (rnn.bias_hh_l0 == 7).all() and len(list(rnn.parameters())) == 4

    def test_other_parametrizations_on_top(self):
        layer = dissolved()
        parametrizations.spectral_norm(layer)
        nn.init.constant_(free(layer), math.nan)
        layer.reset_parameters()
        assert layer.weight.isfinite().all()
        layer.weight = drawn((4, 8), 0)
        assert constraints.penalty(layer) < 1e-24
        for act in constraints.feasibility, constraints.project_:
            with pytest.raises(ValueError, match="^0.weight has another parametriz"):
                act(nn.Sequential(layer))

    def test_a_model_that_is_made_on_meta(self):
        with torch.device("meta"):
            attention = nn.MultiheadAttention(12, 3)
            model = nn.Sequential(
                constraints.dissolve(nn.Embedding(9, 6, padding_idx=1)),
                constraints.dissolve(nn.Linear(4, 4), **ROWS),
                constraints.dissolve(attention, "in_proj_weight", blocks=9),
            )
            model[1].reset_parameters()  # there is nothing to initialise
        model.to_empty(device="cpu")
        model[0].reset_parameters()
        model[1].reset_parameters()
        model[2]._reset_parameters()  # attention has no other
        assert constraints.feasibility(model).weight < 1e-5
        assert not model[0].weight[1].any()


class TestModes:
    @each_case
    def test_inference_mode(self, case):
        with torch.inference_mode():
            layer, x = case.build(1.0)
            inside = output(layer, x)
        layer.requires_grad_(False)
        near(output(layer, x.clone()), inside)
        constraints.penalty(layer)
        assert constraints.feasibility(layer).weight < 1e-12

    @each_case
    def test_fake_tensors_decide_nothing_that_needs_data(self, case):
        with FakeTensorMode():
            layer, x = case.build()
            output(layer, x).sum().backward()
            setattr(layer, case.name, case.w(layer).clone())
            layer.reset_parameters()
            constraints.penalty(layer).backward()
            constraints.project_(layer)

    @pytest.mark.parametrize("name", ["wide", "lstm"])
    def test_one_layer_in_many_threads(self, name):
        """Each gets the gradients of its own input, while another layer is reset."""
        (layer, x), (restless, _) = CASES[name].build(), CASES[name].build()
        weights, inputs = list(layer.parameters()), [x + i for i in range(6)]

        def work(x):
            kept = constraints.Constraints(layer)
            loss, penalty = kept.with_penalty(lambda: output(layer, x).square().sum())
            return torch.autograd.grad(loss + penalty, weights)

        expected = [work(x) for x in inputs]
        with ThreadPoolExecutor(5) as pool:
            resets = [pool.submit(restless.reset_parameters) for _ in range(50)]
            near(list(pool.map(work, inputs * 5)), expected * 5, 1e-12)
            assert all(reset.result() is None for reset in resets)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_dtypes(self, dtype):
        layer = constraints.dissolve(nn.Linear(8, 4, dtype=dtype))
        assert constraints.feasibility(layer).weight < 20 * torch.finfo(dtype).eps
        for other in dtype, torch.float64, torch.bfloat16, torch.float32:
            layer.to(other)
            assert layer(torch.randn(3, 8, dtype=other)).dtype == other
            at_least = torch.promote_types(other, torch.float32)
            assert constraints.penalty(layer).dtype == at_least


LARGE = {"num_layers": 2, "bidirectional": True, "batch_first": True}
SORTS = [*((kind, {}) for kind in (nn.RNN, nn.GRU)), (nn.LSTM, {"proj_size": 3})]


class TestRecurrent:
    @pytest.mark.parametrize(("kind", "options"), [*SORTS, (nn.LSTM, LARGE)])
    @pytest.mark.parametrize("per_gate", [False, True])
    def test_computes_as_a_plain_one_with_the_mapped_weights(
        self, kind, options, per_gate
    ):
        rnn, other = kind(5, 6, **options, **F64), kind(5, 6, **options, **F64)
        constraints.dissolve_recurrent(rnn, per_gate=per_gate)
        names = [n for n in rnn._flat_weights_names if "weight_hh" in n]
        assert list(rnn.parametrizations) == names
        for name in names:
            gates = getattr(rnn, name).unflatten(0, (-1, 6) if per_gate else (1, -1))
            eye = torch.eye(gates.shape[-1], **F64).expand(len(gates), -1, -1)
            near(gates.mT @ gates, eye)
        with torch.no_grad():
            for name in rnn._flat_weights_names:
                getattr(other, name).copy_(getattr(rnn, name))
        x = torch.randn(3, 3, 5, **F64)
        first = options.get("batch_first", False)
        packed = pack_padded_sequence(x, [3, 2, 2], batch_first=first)
        assert torch.equal(rnn(x)[0], other(x)[0])
        assert torch.equal(rnn(packed)[0].data, other(packed)[0].data)

    def test_each_map_is_computed_once_a_pass_and_none_is_kept(self, monkeypatch):
        calls, map_of = [], Dissolved.forward
        monkeypatch.setattr(
            Dissolved, "forward", lambda *args: calls.append(1) or map_of(*args)
        )
        rnn = constraints.dissolve_recurrent(nn.LSTM(5, 6, 2, **F64))
        for _ in range(2):  # training, then evaluation
            calls.clear()
            rnn(torch.randn(4, 3, 5, **F64))
            assert len(calls) == 2
            rnn.eval()
        kept = [value for module in rnn.modules() for value in vars(module).values()]
        assert not any(isinstance(value, torch.Tensor) for value in kept)
        assert not any(vars(rnn)["_flat_weights"])

    @each_rnn
    def test_within_each_other(self, kind):
        class Two(kind):
            def __init__(self):
                super().__init__(5, 5, **F64)
                self.inner = constraints.dissolve_recurrent(kind(5, 5, **F64))

            def forward(self, x, h=None):
                return super().forward(self.inner(self.inner(x)[0])[0], h)

        two, x = Two(), torch.randn(3, 2, 5, **F64)
        projected = constraints.dissolve_recurrent(copy.deepcopy(two)).weight_hh_l0
        two.weight_hh_l0.data.copy_(projected)
        expected = two(x)[0]
        constraints.dissolve_recurrent(two)
        near(two(x)[0], expected)
        with pytest.raises(RuntimeError, match="input.size"):
            two(torch.randn(3, 2, 4, **F64))
        near(two(x)[0], expected)  # nothing is left of the error
