"""Roles and objects for the tests of references, gradients and rendezvous."""

import torch
from threadpoolctl import threadpool_info
from torch import nn

from cdopt_tutorial.engines.seam import gradients
from cdopt_tutorial.engines.seam.reference import Ref
from cdopt_tutorial.engines.seam.rendezvous import Rendezvous, all_that_was_brought


class Part(nn.Module):
    """A layer that another worker owns, in float64."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(5, 3, dtype=torch.float64)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def rows(self, tokens):
        return self.table(tokens)

    def scores(self, vectors, factor):
        return factor * self.layer(vectors), vectors.sum()

    def weights(self):
        # An nn.Parameter would travel as a copy, outside the graph.
        return [w.view_as(w) for w in self.layer.parameters()]

    def leave(self, context, forget):
        """The gradients of a context; and whether .grad was touched."""
        names = {p: name for name, p in self.named_parameters()}
        found = gradients.gradients(context, self.parameters())
        if forget:
            gradients.forget(context)
        return {names[p]: g for p, g in found.items()}


def losses(ref, scale):
    """A loss through three calls, one of which gives lists; own parameter included."""
    own = nn.Parameter(torch.full((2,), scale, dtype=torch.float64))
    rows = gradients.call(ref, "rows", torch.tensor([0, 1, 1]))
    scores, total = gradients.call(ref, "scores", torch.tanh(rows), 2.0)
    weight, bias = gradients.call(ref, "weights")
    return own, (own * scores).square().sum() + total + weight.sum() * bias.prod()


def step(engine, ref, scale=1.0):
    """One step's gradients: of the caller's own parameter, and of the part's."""
    with engine.context() as context:
        own, loss = losses(ref, scale)
        gradients.backward(context, loss)
        mine = gradients.gradients(context, [own])[own]
        theirs = ref.rpc_sync().leave(context, True)
    return loss.item(), {"own": mine, **theirs}


def train(engine, scale=1.0):
    """A trainer's role: the part is on ``ps``, one for all trainers."""
    ref = engine.remote("ps", Part, 3, name="part")
    return [step(engine, ref, scale) for _ in range(3)]


def interleaved(engine):
    """Two contexts at once, one finished inside of the other's life on the owner."""
    ref = engine.remote("ps", Part, 3)
    with engine.context() as first:
        own, loss = losses(ref, 1.0)
        gradients.backward(first, loss)
        before = ref.rpc_sync().leave(first, False)
        again = ref.rpc_sync().leave(first, True)
    after = step(engine, ref)[1]
    return before, again, after


class Doubled(torch.autograd.Function):
    """Notes with how many threads each of its ways is computed."""

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
    """Those that this thread would take now; to ask torch itself would change it."""
    found = [each for each in threadpool_info() if each["user_api"] == "openmp"]
    return max(each["num_threads"] for each in found)


class Doubling:
    def __init__(self):
        self.threads = []

    def double(self, x):
        return Doubled.apply(x, self.threads)

    def seen(self):
        return self.threads


def double(engine, times):
    """With how many threads calls, and their ways back, were computed."""
    ref = engine.remote("ps", Doubling)
    for _ in range(times):
        with engine.context() as context:
            x = torch.ones(2, requires_grad=True)
            result = gradients.call(ref, Doubling.double, x)
            gradients.backward(context, result.sum())
    return ref.rpc_sync().seen()


class Host:
    """Where callers meet."""

    def __init__(self, guests):
        self._all = Rendezvous(all_that_was_brought, range(guests))

    def meet(self, guest, brought):
        return self._all.enter(guest, brought)


def meet(engine, guest, guests, rounds):
    """A guest's role: what everyone brought, round by round."""
    host = engine.remote("ps", Host, guests, name="host").rpc_sync()
    return [host.meet(guest, (guest, number)) for number in range(rounds)]


def references(engine):
    """What a name says of its object, and how it can be called."""
    ref = engine.remote("ps", list, (3, 1, 2))
    here = engine.reference([7])
    return {
        "owner": (ref.owner_name(), ref.is_owner(), here.is_owner()),
        "sync": ref.rpc_sync().count(1),
        "async": ref.rpc_async().index(2).wait(),
        "keyword": ref.rpc_sync().sort(reverse=True),
        "function": gradients.call(ref, sorted),
        "state": gradients.call(ref, list.copy),
        "here": (here.local_value(), here.rpc_sync().pop(), here == Ref.to([7])),
    }
