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
    drawn,
    each_case,
    free,
    move_,
    near,
    output,
)
from torch import func, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints.dissolved import Dissolved


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


@each_case
def test_transforms_of_torch_func_and_forward_mode(case):
    """Derivatives over W and over the input, and ensembles of copies."""
    layer, x = case.build()
    onto, w = drawn(output(layer, x).shape, 1), case.w(layer).detach()

    def ours(w):
        return (output(layer, x, {case.key: w}) * onto).sum().tanh()

    def theirs(w):
        return (case.plain_output(layer, w, x) * onto).sum().tanh()

    near(func.grad(ours)(w), func.grad(theirs)(w))
    if isinstance(layer, nn.RNNBase):  # for which torch has no more
        return
    tangents = (drawn(w.shape, 2),)
    near(func.jvp(ours, (w,), tangents), func.jvp(theirs, (w,), tangents))
    expected = func.hessian(theirs)(w)
    for one, other in product((func.jacfwd, func.jacrev), repeat=2):
        near(one(other(ours))(w), expected)
    call = partial(output, layer)
    near(func.jacfwd(call)(x), func.jacrev(call)(x))
    layers = layer, move_(copy.deepcopy(layer))
    found = func.vmap(partial(output, layer, x))(func.stack_module_state(layers)[0])
    near(found, torch.stack([output(one, x) for one in layers]))


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
        (before / 0, f"^'{case.name}' of .* is not finite$"),
    ]:
        with pytest.raises(ValueError, match=line):
            setattr(layer, case.name, value)
        assert torch.equal(case.w(layer), before)


class TestReset:
    @each_case
    def test_initialises_and_projects(self, case):
        (layer, x), other = case.build(), case.plain()
        layer.to("meta").to_empty(device="cpu")
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

    def test_that_calls_another_one_or_assigns(self):
        class Attention(nn.MultiheadAttention):
            def reset_parameters(self):
                self._reset_parameters()
                nn.init.eye_(self.in_proj_weight)

        class Assigns(nn.Linear):
            def reset_parameters(self):
                super().reset_parameters()
                self.weight = nn.Parameter(torch.eye(4, 8, **F64))

        for layer, name in (
            (Attention(6, 2, **F64), "in_proj_weight"),
            (Assigns(8, 4, **F64), "weight"),
        ):
            constraints.dissolve(layer, name)
            move_(layer, 3.0)
            layer.reset_parameters()
            found = getattr(layer, name).detach()
            near(found, torch.eye(*found.shape, **F64))

    def test_of_attention_which_has_another_name_for_it(self):
        attention = nn.MultiheadAttention(12, 3)
        constraints.dissolve(attention, "in_proj_weight", blocks=9)
        move_(attention, 3.0)._reset_parameters()
        assert constraints.feasibility(attention).weight < 1e-5


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

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_dtypes(self, dtype):
        """A penalty has at least float32's, where float16 would overflow."""
        layer = constraints.dissolve(nn.Linear(8, 4, dtype=dtype))
        assert constraints.feasibility(layer).weight < 20 * torch.finfo(dtype).eps
        layer = constraints.dissolve(nn.Linear(512, 512, dtype=dtype))
        move_(layer, 4.0)
        for other in dtype, torch.float64, torch.bfloat16, torch.float32:
            layer.to(other)
            assert layer(torch.randn(3, 512, dtype=other)).dtype == other
            penalty = constraints.penalty(layer)
            assert penalty.dtype == torch.promote_types(other, torch.float32)
            assert penalty.item() == pytest.approx(11520, rel=0.02)
        layers = [layer, CASES["tall"].build()[0]]
        one, two = (constraints.penalty(*order) for order in (layers, layers[::-1]))
        assert one.dtype == two.dtype == torch.float64 and one == two


LARGE = {"num_layers": 2, "bidirectional": True, "batch_first": True}
SORTS = [
    (nn.RNN, {}),
    (nn.GRU, {}),
    (nn.LSTM, {"proj_size": 3}),
    (nn.LSTM, LARGE),
]


class TestRecurrent:
    @pytest.mark.parametrize(("kind", "options"), SORTS)
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
        state = {name: getattr(rnn, name) for name in rnn._flat_weights_names}
        x = torch.randn(3, 3, 5, **F64)
        first = options.get("batch_first", False)
        packed = pack_padded_sequence(x, [3, 2, 2], batch_first=first)
        assert torch.equal(rnn(x)[0], func.functional_call(other, state, x)[0])
        expected = func.functional_call(other, state, (packed,))[0]
        assert torch.equal(rnn(packed)[0].data, expected.data)

    def test_each_map_is_computed_once_a_pass_and_none_is_kept(self, spy):
        rnn = constraints.dissolve_recurrent(nn.LSTM(5, 6, 2, **F64))
        calls = spy(Dissolved, "forward")
        for _ in range(2):  # training, then evaluation
            calls.clear()
            rnn(torch.randn(4, 3, 5, **F64))
            assert len(calls) == 2
            rnn.eval()
        kept = [value for module in rnn.modules() for value in vars(module).values()]
        assert not any(isinstance(value, torch.Tensor) for value in kept)
        assert not any(vars(rnn)["_flat_weights"])

    def test_within_each_other(self):
        class Two(nn.LSTM):
            def __init__(self):
                super().__init__(5, 5, **F64)
                self.inner = constraints.dissolve_recurrent(nn.LSTM(5, 5, **F64))

            def forward(self, x, h=None):
                return super().forward(self.inner(self.inner(x)[0])[0], h)

        two, x = Two(), torch.randn(3, 2, 5, **F64)
        projected = constraints.dissolve_recurrent(copy.deepcopy(two)).weight_hh_l0
        two.weight_hh_l0.data.copy_(projected)
        expected = two(x)[0]
        near(constraints.dissolve_recurrent(two)(x)[0], expected)
        with pytest.raises(ValueError, match="input dtype"):  # as ever
            two(x.float())
