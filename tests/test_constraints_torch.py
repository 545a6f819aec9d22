"""Torch's own tools on dissolved layers of every kind: as on plain ones, and right."""

import copy
import pickle
import weakref
from functools import partial
from itertools import product

import pytest
import torch
from cdopt.manifold_torch import grassmann_torch
from constrained import F64, dissolved, drawn, free, lstm, move_
from torch import nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vmap,
)
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    vector_to_parameters,
)

from cdopt_tutorial import constraints
from cdopt_tutorial.constraints.measure import Constraints

CASES = {  # the layer, its input, how it is dissolved
    "tall": (partial(nn.Linear, 4, 8), (3, 4), {}),
    "wide": (partial(nn.Linear, 8, 4), (3, 8), {}),
    "square": (partial(nn.Linear, 5, 5), (3, 5), {}),
    "heads": (partial(nn.Linear, 4, 12), (3, 4), {"blocks": 3}),
    "short heads": (partial(nn.Linear, 4, 6), (3, 4), {"blocks": 3}),
    "unit rows": (partial(nn.Linear, 8, 4), (3, 8), {"manifold": "oblique"}),
    "unit columns": (
        partial(nn.Linear, 8, 4),
        (3, 8),
        {"manifold": "oblique", "transpose": True},
    ),
    "sphere": (partial(nn.Linear, 8, 4), (3, 8), {"manifold": "sphere"}),
    "CDOpt's": (partial(nn.Linear, 4, 8), (3, 4), {"manifold": grassmann_torch}),
    "conv2d": (partial(nn.Conv2d, 2, 20, 3), (2, 2, 4, 4), {}),
    "depthwise": (partial(nn.Conv2d, 4, 8, 3, groups=4), (2, 4, 5, 5), {}),
    "transposed": (partial(nn.ConvTranspose1d, 4, 3, 2), (2, 4, 3), {}),
    "bilinear": (partial(nn.Bilinear, 4, 4, 5), (3, 4), {}),
    "cell": (partial(nn.GRUCell, 5, 6), (3, 5), {"name": "weight_hh", "blocks": 3}),
    "rnn": (partial(nn.RNN, 5, 6), (4, 3, 5), {"name": "weight_hh_l0"}),
    "lstm": (partial(nn.LSTM, 5, 6), (4, 3, 5), {"name": "weight_hh_l0", "blocks": 4}),
}
each_case = pytest.mark.parametrize("case", CASES)
# Torch has no derivative of an LSTM's backward pass, nor vmap of an LSTM.
without_rnns = pytest.mark.parametrize(
    "case", [name for name in CASES if name not in ("rnn", "lstm")]
)


def build(case, factor=1.05, dtype=torch.float64):
    """The layer, off its manifold, an input, and the name of its weight."""
    make, shape, options = CASES[case]
    torch.manual_seed(0)
    layer = constraints.dissolve(make(dtype=dtype), **options)
    return move_(layer, factor), torch.randn(shape, dtype=dtype), name_of(case)


def name_of(case):
    return CASES[case][2].get("name", "weight")


def output(layer, *inputs):
    if isinstance(layer, nn.Bilinear):
        inputs *= 2
    found = layer(*inputs)
    return found[0] if isinstance(found, tuple) else found


def key(case):
    return f"parametrizations.{name_of(case)}.original"


def plain_output(case, layer, plain, weight, x):
    """The plain layer with the weight that the formula gives for W."""
    options = CASES[case][2]
    blocks, rows = options.get("blocks", 1), weight.flatten(1)
    if options.get("manifold") in ("oblique", "sphere"):
        axes = (0, 1) if options["manifold"] == "sphere" else 1
        axes = 0 if options.get("transpose") else axes
        mapped = 2 * rows / (1 + rows.square().sum(axes, keepdim=True))
    else:
        parts = rows.unflatten(0, (blocks, -1))
        tall = parts.shape[1] >= parts.shape[2]
        parts = parts if tall else parts.mT
        cubic = parts @ (parts.mT @ parts)
        mapped = 1.5 * parts - 0.5 * cubic
        mapped = (mapped if tall else mapped.mT).flatten(0, 1)
    state = {n: p for n, p in layer.named_parameters() if n != key(case)}
    state[name_of(case)] = mapped.reshape(weight.shape)
    inputs = (x, x) if isinstance(plain, nn.Bilinear) else (x,)
    found = functional_call(plain, state, inputs)
    return found[0] if isinstance(found, tuple) else found


def near(one, other, tol=1e-11):
    torch.testing.assert_close(one, other, rtol=tol, atol=tol)


class TestTransforms:
    """Of torch.func, and forward-mode AD: over the input, and over W."""

    def both(self, case):
        """The loss as a function of W: of the layer, and of the plain one."""
        layer, x, _ = build(case)
        onto = drawn(output(layer, x).shape, 1)

        def ours(w):
            found = functional_call(layer, {key(case): w}, (x, x)[: 1 + is_two])
            found = found[0] if isinstance(found, tuple) else found
            return (found * onto).sum().tanh()

        def plain(w):
            return (plain_output(case, layer, other, w, x) * onto).sum().tanh()

        other = CASES[case][0](**F64)
        is_two = isinstance(layer, nn.Bilinear)
        return ours, plain, free(layer, name_of(case)).detach(), layer, x

    @each_case
    def test_gradients_and_tangents_of_the_weight(self, case):
        ours, plain, w, *_ = self.both(case)
        near(grad(ours)(w), grad(plain)(w))
        if case not in ("rnn", "lstm"):  # which have no forward mode in torch
            tangent = drawn(w.shape, 2)
            for one, other in zip(
                jvp(ours, (w,), (tangent,)), jvp(plain, (w,), (tangent,)), strict=True
            ):
                near(one, other)

    @without_rnns
    def test_second_derivatives_of_every_order(self, case):
        ours, plain, w, *_ = self.both(case)
        expected = hessian(plain)(w)
        for one, other in product((jacfwd, jacrev), repeat=2):
            near(one(other(ours))(w), expected)

    @each_case
    def test_of_the_input_with_and_without_gradients(self, case):
        layer, x, _ = build(case)
        expected = output(layer, x)
        x.requires_grad_()
        (expected_gradient,) = torch.autograd.grad(output(layer, x).sum(), x)
        near(grad(lambda x: output(layer, x).sum())(x.detach()), expected_gradient)
        x = x.detach()
        if case not in ("rnn", "lstm"):
            for context in torch.no_grad, torch.enable_grad:
                with context():
                    near(vmap(partial(output, layer))(x[:, None])[:, 0], expected)
            jacobian = jacfwd(partial(output, layer))(x)
            near(jacobian, jacrev(partial(output, layer))(x))

    @each_case
    def test_an_ensemble_of_copies(self, case):
        layers = [build(case, factor)[0] for factor in (1.0, 1.1)]
        layers[1:] = [copy.deepcopy(layers[0])]
        move_(layers[1], 1.1)
        parameters, buffers = stack_module_state(layers)
        _, x, _ = build(case)

        def call(parameters):
            inputs = (x, x) if isinstance(layers[0], nn.Bilinear) else (x,)
            found = functional_call(layers[0], (parameters, buffers), inputs)
            return found[0] if isinstance(found, tuple) else found

        if case not in ("rnn", "lstm"):
            for one, layer in zip(vmap(call)(parameters), layers, strict=True):
                near(one, output(layer, x))

    def test_the_penalty(self):
        layer, w = dissolved(), drawn((4, 8), 0)

        def ours(w):
            return layer.parametrizations.weight[0].distance(w)

        def plain(w):
            return (w @ w.mT - torch.eye(4, **F64)).square().sum()

        near(grad(ours)(w), grad(plain)(w))
        near(hessian(ours)(w), hessian(plain)(w))
        near(vmap(grad(ours))(torch.stack([w, 2 * w])), vmap(grad(plain))(
            torch.stack([w, 2 * w])))  # fmt: skip


class TestCopies:
    @each_case
    def test_a_deep_copy_is_equal_separate_and_of_one_class(self, case):
        layer, x, name = build(case)
        before = output(layer, x)  # a pass's graph doesn't get in the way
        copied = copy.deepcopy(layer)
        assert type(copied) is type(layer)
        near(output(copied, x), before, 0)
        assert constraints.penalty(copied) == constraints.penalty(layer) > 0
        before.sum().backward()
        assert all(p.grad is None for p in copied.parameters())
        move_(copied)
        near(output(layer, x), before, 0)

    @each_case
    def test_is_saved_by_its_state_and_not_pickled(self, case):
        layer, x, _ = build(case)
        other, *_ = build(case, 1.0)
        other.load_state_dict(copy.deepcopy(layer.state_dict()))
        near(output(other, x), output(layer, x), 0)
        with pytest.raises(RuntimeError, match="only supported through state_dict"):
            pickle.dumps(layer)

    @each_case
    def test_removal_leaves_a_plain_layer(self, case):
        layer, x, name = build(case)
        plain = CASES[case][0](**F64)
        assert parametrize.type_before_parametrizations(layer) is type(plain)
        expected, w = output(layer, x), free(layer, name)
        parametrize.remove_parametrizations(layer, name)
        assert type(layer) is type(plain) and vars(layer).keys() == vars(plain).keys()
        assert getattr(layer, name) is w
        near(output(layer, x), expected)
        sent = pickle.dumps(layer)
        assert b"cdopt_tutorial" not in sent
        near(output(pickle.loads(sent), x), expected)
        layer.load_state_dict(plain.state_dict())
        near(output(layer, x), output(plain, x), 0)
        constraints.dissolve(layer, **CASES[case][2])
        assert constraints.feasibility(layer).weight < 1e-12

    def test_an_optimizer_that_is_copied_along_moves_the_copy(self):
        layer = move_(dissolved())
        optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
        other, its_optimizer = copy.deepcopy((layer, optimizer))
        for each, moves in (layer, optimizer), (other, its_optimizer):
            (each(torch.ones(1, 8, **F64)).sum() + constraints.penalty(each)).backward()
            moves.step()
            assert torch.equal(free(other), free(layer)) == (each is other)

    def test_a_class_keeps_its_hooks_registry_and_copying(self):
        kinds = {}

        class Base(nn.Module):
            def __init_subclass__(cls, **options):
                super().__init_subclass__(**options)
                kinds[cls.__name__] = cls

        class Encoder(Base):
            __slots__ = ("mine",)

            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 8))

            def __deepcopy__(self, memo):
                made = Encoder()
                made.mine = "copied"
                return made

        layer = constraints.dissolve(Encoder())
        assert kinds["Encoder"] is Encoder and isinstance(layer, Encoder)
        assert copy.deepcopy(layer).mine == "copied"

    @pytest.mark.parametrize("first", [True, False])
    def test_other_parametrizations_of_the_layer(self, first):
        """Removed in either order; in between, copies still work."""
        rnn, x = nn.LSTM(5, 6, **F64), torch.randn(4, 3, 5, **F64)
        parametrizations.weight_norm(rnn, "weight_ih_l0")
        constraints.dissolve_recurrent(rnn)
        expected = move_(rnn)(x)[0]
        names = ["weight_ih_l0", "weight_hh_l0"]
        for name in names if first else reversed(names):
            near(copy.deepcopy(rnn)(x)[0], expected)
            parametrize.remove_parametrizations(rnn, name)
            near(rnn(x)[0], expected)
        assert type(rnn) is nn.LSTM


class TestSwapping:
    @pytest.fixture
    def swaps(self):
        """From when it is called; torch can't parametrize an RNN while this is set."""
        yield torch.__future__.set_swap_module_params_on_conversion
        torch.__future__.set_swap_module_params_on_conversion(False)

    @each_case
    def test_conversion_and_loading(self, case, swaps):
        (layer, x, name), (other, *_) = build(case), build(case, 1.2)
        swaps(True)
        (output(layer, x).sum() + constraints.penalty(layer)).backward()
        layer.zero_grad()
        w = free(layer, name)
        layer.float().double()
        assert free(layer, name) is w
        layer.load_state_dict(other.state_dict())
        near(output(layer, x), output(other, x))
        near(constraints.penalty(layer), constraints.penalty(other))


def replace_layer(model):
    model[0] = move_(dissolved(), 1.3)


def fused_step(kind, model):
    optimizer = kind(model.parameters(), 0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


WRITERS = {
    "nothing": lambda model: None,
    "assign": lambda model: model.load_state_dict(
        {name: 1.2 * value for name, value in model.state_dict().items()}, assign=True
    ),
    "load": lambda model: model.load_state_dict(
        {name: 1.2 * value for name, value in model.state_dict().items()}
    ),
    "fused Adam": partial(fused_step, torch.optim.Adam),
    "fused AdamW": partial(fused_step, torch.optim.AdamW),
    "fused SGD": partial(fused_step, torch.optim.SGD),
    "fused Adagrad": partial(fused_step, torch.optim.Adagrad),
    "vector": lambda model: vector_to_parameters(
        1.2 * parameters_to_vector(model.parameters()).detach(), model.parameters()
    ),
    "data in place": lambda model: free(model[0]).data.mul_(1.2),
    "data": lambda model: setattr(free(model[0]), "data", 1.2 * free(model[0]).data),
    "numpy": lambda model: free(model[0]).detach().numpy().__imul__(1.2),
    "a new W": lambda model: setattr(
        model[0].parametrizations.weight, "original", nn.Parameter(1.2 * free(model[0]))
    ),
    "a new layer": replace_layer,
    "another is dissolved": lambda model: constraints.dissolve(model[2]),
    "float and back": lambda model: model.float().double(),
    "meta": lambda model: move_(model.to("meta").to_empty(device="cpu"), 0.0),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("passes", [False, True])
def test_constraints_compute_with_the_weights_that_the_model_has(writer, passes):
    model = move_(nn.Sequential(dissolved(), nn.Tanh(), nn.Linear(4, 3, **F64)))
    kept = Constraints(model)
    if passes:
        model(drawn((2, 8), 0)).sum().backward()
    WRITERS[writer](model)
    model.zero_grad()
    found = kept.penalty()
    found.backward()
    expected = 0
    for layer in model:
        if parametrize.is_parametrized(layer):
            w = free(layer).detach().requires_grad_()
            expected = expected + 0.1 * off(w).square().sum()
    near(found, expected)
    (right,) = torch.autograd.grad(
        0.1 * off(free(model[0])).square().sum(), free(model[0])
    )
    near(free(model[0]).grad, right)
    near(kept.feasibility().weight, constraints.feasibility(model).weight)
    if writer != "meta":
        kept.project_()
        assert constraints.feasibility(model).weight < 1e-6


def off(w):
    small = w @ w.mT if w.shape[0] < w.shape[1] else w.mT @ w
    return small - torch.eye(len(small), **F64)


def test_constraints_say_so_when_nothing_is_constrained_any_more():
    model = nn.Sequential(dissolved())
    kept = Constraints(model)
    parametrize.remove_parametrizations(model[0], "weight")
    with pytest.raises(ValueError, match="no weight of this model is constrained: no"):
        kept.penalty()


def test_a_pass_and_its_penalty_share_one_sum(monkeypatch):
    """Their values and gradients are those of two calls."""
    model = nn.Sequential(
        move_(dissolved()), move_(dissolved(4, 4, manifold="oblique"))
    )
    kept, x = Constraints(model), drawn((2, 8), 0)
    on = type(model[0].parametrizations.weight[0].surface)
    expected = model(x).square().sum(), kept.penalty()
    gradients = torch.autograd.grad(sum(expected), list(model.parameters()))
    monkeypatch.setattr(on, "distance", None)  # would compute the sums once more
    found = kept.with_penalty(lambda: model(x).square().sum())
    near(torch.stack(found), torch.stack(expected))
    for one, other in zip(torch.autograd.grad(sum(found), list(model.parameters())),
                          gradients, strict=True):  # fmt: skip
        near(one, other)


def test_passes_within_each_other_share_their_own_sums():
    one, other = move_(dissolved(8, 8)), move_(dissolved(8, 8))
    x, inner = drawn((2, 8), 0), Constraints(other)

    def both():
        found, penalty = inner.with_penalty(lambda: other(one(x)).sum())
        return found + penalty

    (loss, penalty), expected = (
        Constraints(one).with_penalty(both),
        constraints.penalty(one, other),
    )
    near(loss + penalty, other(one(x)).sum() + expected)


def test_weights_that_are_tied_afterwards_are_noticed():
    one, other = dissolved(), dissolved(manifold="oblique")
    kept = Constraints(one, other)
    other.parametrizations.weight.original = free(one)
    with pytest.raises(ValueError, match="1.weight is the weight of 0.weight, but its"):
        kept.penalty()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_is_compiled_and_exported_as_torchs_own(kind, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)
    rnn, x = (
        move_(constraints.dissolve_recurrent(kind(5, 6, **F64))),
        torch.randn(4, 5, **F64),
    )
    exported = torch.export.export(rnn, (x,), strict=True).module()
    near(exported(x)[0], rnn(x)[0])


def test_a_checkpointed_pass_leaves_the_penalty_its_gradient():
    layer, x = move_(dissolved()), drawn((2, 8), 0).requires_grad_()
    kept = Constraints(layer)
    found = []
    for reentrant in True, False:
        run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
        loss, penalty = kept.with_penalty(lambda run=run: run(layer, x).sum())
        layer.zero_grad()
        (loss + penalty).backward()
        found.append(free(layer).grad.clone())
    layer.zero_grad()
    (layer(x).sum() + kept.penalty()).backward()
    for each in found:
        near(each, free(layer).grad)


def test_a_pass_leaves_nothing_behind():
    layer = move_(dissolved())
    mapped = layer.weight
    left = weakref.ref(mapped)
    layer(drawn((2, 8), 0))
    del mapped
    assert left() is None
    rnn = lstm()
    rnn(torch.randn(4, 3, 5, **F64))
    kept = [value for module in rnn.modules() for value in vars(module).values()]
    assert not any(isinstance(each, torch.Tensor) for each in kept)
    assert rnn._flat_weight_refs is not None and copy.deepcopy(rnn) is not None
