"""Roles and objects for the tests of references, gradients, rendezvous and traces."""

import threading
import time

import pytest
import torch
import torch.distributed.rpc as rpc
from roles import Counter, raise_error
from threadpoolctl import threadpool_info
from torch import nn

from cdopt_tutorial.calls import apply, gradients, reference, remote
from cdopt_tutorial.calls.rendezvous import Rendezvous, all_that_was_brought
from cdopt_tutorial.probes import trace
from cdopt_tutorial.run import span


class Part(nn.Module):
    """A layer that another worker owns, in float64."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(5, 3, dtype=torch.float64)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.ones(2, dtype=torch.float64), False)

    def rows(self, tokens):
        return self.table(tokens)

    def scores(self, vectors, factor):
        return factor * self.fixed * self.layer(vectors), vectors.sum()

    def weights(self):
        # An nn.Parameter would travel as a copy, outside the graph.
        return [w.view_as(w) for w in self.layer.parameters()]

    def leave(self, context, forget):
        """The gradients of a context."""
        names = {p: name for name, p in self.named_parameters()}
        found = gradients.gradients(context, self.parameters())
        if forget:
            gradients.forget(context)
        return {names[p]: g for p, g in found.items()}


def losses(ref, scale):
    """A loss through three calls, one returning a list, and a parameter of our own."""
    own = nn.Parameter(torch.full((2,), scale, dtype=torch.float64))
    rows = gradients.call(ref, "rows", torch.tensor([0, 1, 1]))
    scores, total = gradients.call(ref, "scores", torch.tanh(rows), 2.0)
    weight, bias = gradients.call(ref, "weights")
    return own, (own * scores).square().sum() + total + weight.sum() * bias.prod()


def step(ref, scale=1.0):
    """One step's gradients: of the caller's own parameter, and of the part's."""
    with gradients.context() as context:
        own, loss = losses(ref, scale)
        gradients.backward(context, loss)
        mine = gradients.gradients(context, [own])[own]
        theirs = ref.rpc_sync().leave(context, True)
    return loss.item(), {"own": mine, **theirs}


def left(ref, scale):
    """What a context leaves on the owner, fetched twice, since it stays there."""
    with gradients.context() as context:
        gradients.backward(context, losses(ref, scale)[1])
        return [ref.rpc_sync().leave(context, forget) for forget in (False, True)]


class Doubled(torch.autograd.Function):
    """Notes how many threads its forward and its backward pass have."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        seen.append(openmp_threads())
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(openmp_threads())
        return 2 * gradient, None


def openmp_threads():
    """How many this thread would use now; torch's own answer would change it."""
    found = [each for each in threadpool_info() if each["user_api"] == "openmp"]
    return max(each["num_threads"] for each in found)


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.threads = []

    def double(self, x):
        return Doubled.apply(x, self.threads)

    def seen(self):
        return self.threads


def double(times):
    """How many threads calls, and their backward passes, had."""
    ref = remote("ps", Doubling)
    for _ in range(times):
        with gradients.context() as context:
            x = torch.ones(2, requires_grad=True)
            result = gradients.call(ref, Doubling.double, x)
            gradients.backward(context, result.sum())
    return ref.rpc_sync().seen()


class Host:
    """Where callers are answered, or fail, together."""

    def __init__(self, guests):
        self._all = Rendezvous(all_that_was_brought, range(guests))
        self._none = Rendezvous(lambda brought: 1 / 0, range(guests))

    def enter(self, guest, brought):
        return self._all.enter(guest, brought)

    def fail(self, guest):
        return self._none.enter(guest)


def gather(guest, guests, rounds):
    """What everyone brought, round by round; and the error raised for all."""
    host = remote("ps", Host, guests, name="host").rpc_sync()
    met = [host.enter(guest, (guest, number)) for number in range(rounds)]
    try:
        return met, host.fail(guest)
    except ZeroDivisionError as error:
        return met, error.raised_on


def references():
    """What a reference knows of its object, and all ways to call it."""
    ref = remote("ps", list, (3, 1, 2))
    here = reference([7])
    return {
        "owner": (ref.owner_name(), ref.is_owner(), here.is_owner()),
        "sync": ref.rpc_sync().count(1),
        "async": ref.rpc_async().index(2).wait(),
        "keyword": ref.rpc_sync().sort(reverse=True),
        "function": apply(ref, sorted),
        "state": apply(ref, list.copy),
        "here": (here.local_value(), here.rpc_sync().pop(), here == reference([7])),
    }


def take_part(guest, guests):
    """All of the above, beside other guests that share a part on ``ps``."""
    scale = 1.0 + guest
    shared = remote("ps", Part, 3, name="part")
    return {
        "steps": [step(shared, scale) for _ in range(3)],
        "left": left(shared, scale),
        "threads": double(10),
        "met": gather(guest, guests, 20),
        "references": references(),
    }


class Slow(torch.autograd.Function):
    """Twice its argument, with a backward pass that takes 0.1 s."""

    @staticmethod
    def forward(ctx, values):
        return 2 * values

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.1)
        return 2 * grad


def later(value, seconds):
    """A future that completes after so many seconds."""
    future = torch.futures.Future()
    threading.Timer(seconds, future.set_result, (value,)).start()
    return future


class Callee(Counter):
    """Returns at once, after a while, or by a future."""

    def sleep(self, seconds):
        time.sleep(seconds)

    def answer_later(self, value, seconds):
        return later(value, seconds)


def converse():
    """Calls of every kind, with spans; the gradient of a marked function."""
    ref = remote("ps", Callee)
    with span("calling"):
        ref.rpc_sync().add(torch.ones(1000))
    with pytest.raises(KeyError, match="no such thing"):
        ref.rpc_async().fail("KeyError").wait()
    ref.rpc_async().sleep(0.1).wait()
    assert ref.rpc_async().answer_later(7, 0.3).wait() == 7
    apply(ref, Callee.add, 1)
    rref = rpc.remote("ps", Callee)
    apply(rref, Callee.add, 1)
    assert rref.rpc_sync().add_later(1) == 2
    with pytest.raises(ArithmeticError):
        rpc.rpc_sync("ps", raise_error)
    lock = remote("ps", threading.Lock)  # which does not pickle
    lock.rpc_sync().locked()
    return gradient_of_a_marked_function()


def gradient_of_a_marked_function():
    values = torch.ones(3, requires_grad=True)
    tripled = 0.75 * Slow.apply(values).square()
    result = trace.mark_backward("marked", tripled, values)
    with span("between"):
        time.sleep(0.3)
    result.sum().backward()
    trace.mark_until_done("until", later(None, 2.0)).wait()
    return values.grad
