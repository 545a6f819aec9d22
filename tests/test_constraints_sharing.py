"""A pass and its penalty are of the weights as they are: nothing is stale or freed.

Random sequences of the operations of training loops are compared with the same ones on
plain tensors, where each map and penalty is computed anew, by the formulas.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from constrained import F64, drawn, move_
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import nn
from torch.func import functional_call

from cdopt_tutorial import constraints

NAMES = ("first", "again")
small = st.integers(0, 3)


class Net(nn.Module):
    """A wide Stiefel layer, and an oblique one that is used twice a pass."""

    def __init__(self):
        super().__init__()
        self.first = constraints.dissolve(nn.Linear(4, 3, bias=False, **F64))
        self.again = constraints.dissolve(
            nn.Linear(3, 3, bias=False, **F64), manifold="oblique", penalty_param=0.3
        )

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.again(self.again(hidden).tanh())

    def weights(self):
        return [getattr(self, n).parametrizations.weight.original for n in NAMES]


def plain_forward(weights, x):
    w, v = weights
    mapped = 1.5 * w - 0.5 * w @ w.mT @ w
    rows = 2 * v / (1 + v.square().sum(1, keepdim=True))
    return ((x @ mapped.mT).tanh() @ rows.mT).tanh() @ rows.mT


def plain_distances(weights):
    w, v = weights
    return (
        (w @ w.mT - torch.eye(3, **F64)).square().sum(),
        (v.square().sum(1) - 1).square().sum(),
    )


def plain_penalty(weights):
    stiefel, oblique = plain_distances(weights)
    return 0.1 * stiefel + 0.3 * oblique


def in_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def near(one, other):
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


class Sequences(RuleBasedStateMachine):
    """Each term of a loss has two values: from the model, and from plain tensors."""

    @initialize(seed=small)
    def begin(self, seed):
        torch.manual_seed(seed)
        self.model, self.terms = move_(Net()), []
        self.follow()

    def follow(self):
        """Copy the model's weights, after which older graphs are useless."""
        self.plain = [w.detach().clone().requires_grad_() for w in self.model.weights()]
        for mine, yours in zip(self.plain, self.model.weights(), strict=True):
            mine.grad = None if yours.grad is None else yours.grad.clone()
        self.terms.clear()

    def add(self, ours, plain):
        near(ours, plain)
        self.terms.append((ours, plain))

    @rule(seed=small, aside=st.booleans())
    def forward(self, seed, aside):
        x = drawn((2, 4), seed)
        ours = in_thread(self.model, x) if aside else self.model(x)
        self.add(ours.square().sum(), plain_forward(self.plain, x).square().sum())

    @rule(aside=st.booleans())
    def penalty(self, aside):
        get = constraints.penalty
        ours = in_thread(get, self.model) if aside else get(self.model)
        self.add(ours, plain_penalty(self.plain))

    @rule(seed=small)
    def forward_with_other_weights(self, seed):
        other = [drawn((3, 4), seed), drawn((3, 3), seed)]
        other = [w.requires_grad_() for w in other]
        names = [f"{name}.parametrizations.weight.original" for name in NAMES]
        x = drawn((2, 4), seed)
        state = dict(zip(names, other, strict=True))
        near(functional_call(self.model, state, x), plain_forward(other, x))

    @precondition(lambda self: self.terms)
    @rule(place=small, retain=st.booleans())
    def backward(self, place, retain):
        place %= len(self.terms)
        for term in self.terms[place]:
            term.backward(retain_graph=retain)
        if not retain:
            del self.terms[place]

    @precondition(lambda self: self.terms)
    @rule()
    def backward_of_the_sum(self):
        for terms in zip(*self.terms, strict=True):
            sum(terms).backward()
        self.terms.clear()

    @precondition(lambda self: self.terms)
    @rule(place=small)
    def gradient(self, place):
        ours, plain = self.terms.pop(place % len(self.terms))
        one = torch.autograd.grad(ours, self.model.weights())
        for mine, yours in zip(
            one, torch.autograd.grad(plain, self.plain), strict=True
        ):
            near(mine, yours)

    @rule()
    def step(self):
        torch.optim.SGD(self.model.parameters(), 0.02).step()
        torch.optim.SGD(self.plain, 0.02).step()
        self.terms.clear()

    @rule()
    def zero_grad(self):
        self.model.zero_grad()
        for weight in self.plain:
            weight.grad = None

    @rule()
    def assign_data(self):
        for weight in self.model.weights():
            weight.data = weight.detach() * 0.98
        self.follow()

    @rule()
    def write_into_data(self):
        """Which autograd does not notice."""
        for weight in self.model.weights():
            weight.data.mul_(1.01)
        self.follow()

    @rule()
    def look(self):
        x = drawn((2, 4), 0)
        with torch.no_grad():
            near(self.model.eval()(x), plain_forward(self.plain, x))
            near(constraints.penalty(self.model), plain_penalty(self.plain))
            self.model.train()
        found = constraints.feasibility(self.model).layers
        distances = plain_distances(self.plain)
        for (_, mine), yours in zip(found.items(), distances, strict=True):
            near(mine.weight, yours.sqrt().item())

    @rule()
    def continue_with_a_copy(self):
        self.model = copy.deepcopy(self.model)
        self.follow()

    @rule()
    def project(self):
        constraints.project_(self.model)
        assert constraints.feasibility(self.model).weight < 1e-12
        self.follow()

    @invariant()
    def gradients_are_equal(self):
        for mine, yours in zip(self.model.weights(), self.plain, strict=True):
            assert (mine.grad is None) == (yours.grad is None)
            if mine.grad is not None:
                near(mine.grad, yours.grad)
            near(mine, yours)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=20, stateful_step_count=25)


def test_gradients_of_two_threads_do_not_mix():
    """Threads train on one model: each gets the gradients of its own input."""
    model, wrong = Net(), []
    weights = model.weights()

    def work(seed):
        x = drawn((2, 4), seed)
        plain = [w.detach().clone().requires_grad_() for w in weights]
        expected = torch.autograd.grad(
            plain_forward(plain, x).sum() + plain_penalty(plain), plain
        )
        for _ in range(20):
            loss = model(x).sum() + constraints.penalty(model)
            found = torch.autograd.grad(loss, weights)
            pairs = zip(found, expected, strict=True)
            wrong.append(max((a - b).abs().max().item() for a, b in pairs))

    with ThreadPoolExecutor(3) as pool:
        pool.map(work, range(3))
        work(3)  # and the main one
    assert len(wrong) == 80 and max(wrong) < 1e-12
