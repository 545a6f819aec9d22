"""Roles and objects for the tests of references, gradients and traces."""

import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed.rpc as rpc
from roles import Counter, raise_error
from threadpoolctl import threadpool_info
from torch import nn

from cdopt_tutorial.calls import apply, gradients, network, reference, remote
from cdopt_tutorial.probes import trace
from cdopt_tutorial.run import span


class Doubled(torch.autograd.Function):
    """Notes how many threads its forward and its backward pass have."""

    threads = []

    @staticmethod
    def forward(ctx, x):
        Doubled.threads.append(openmp_threads())
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        Doubled.threads.append(openmp_threads())
        return 2 * gradient


def openmp_threads():
    """How many this thread would use now; torch's own answer would change it."""
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "openmp"]
    return max(pool["num_threads"] for pool in pools)


def double(module, x):
    return Doubled.apply(x)


def threads_seen(module):
    return Doubled.threads


def count_threads():
    """How many threads calls on ``ps``, and their backward passes, had."""
    ref = remote("ps", nn.Identity)
    for _ in range(10):
        with gradients.context() as context:
            x = torch.ones(2, requires_grad=True)
            gradients.backward(context, gradients.call(ref, double, x).sum())
    return apply(ref, threads_seen)


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


class Scale(nn.Module):
    """Multiplies by its weight, and adds what others make of that."""

    def __init__(self, weight, *others):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))
        self.unused = nn.Parameter(torch.ones(()))
        self.fixed = nn.Parameter(torch.ones(()), requires_grad=False)
        self.others = others

    def forward(self, x):
        x = x * self.weight
        return x + sum(gradients.call(other, "forward", x) for other in self.others)

    def several(self, x, factor):
        # An nn.Parameter would travel as a copy, outside the graph.
        return [factor * self.fixed * x * self.weight, self.weight.view_as(self.weight)]

    def look_up(self, index):
        return self.weight.view(1)[index]

    def looks_up(self, x):
        """What it calls has no gradient to return."""
        return gradients.call(self.others[0], "look_up", torch.tensor(0)) * x

    def logs(self, x):
        """Its result has nothing of what it calls."""
        gradients.call(self.others[0], "forward", x)
        return x * self.weight

    def catches(self, x):
        with suppress(LookupError):
            gradients.call(self.others[0], "fails", x)
        return x * self.weight

    def fails(self, x):
        self(x)
        raise LookupError

    def leave(self, context):
        """The gradients of a context, which stay until they are forgotten."""
        left = gradients.gradients(context, self.parameters())
        return {n: left[p].item() for n, p in self.named_parameters() if p in left}

    def forget(self, context):
        gradients.take_sum([context], [])
        self.zero_grad()  # in one process


def once(first, last, x):
    return gradients.call(first, "forward", x)


def by_two_ways(first, last, x):
    """One object is called from here, and within calls from here."""
    ways = [(r, k) for k in (1, 2, 3) for r in (first, last)]
    return sum(gradients.call(r, "forward", x * k) for r, k in ways)


def several_results(first, last, x):
    product, weight = gradients.call(last, "several", x, 5.0)
    return product * weight


def unused(first, last, x):
    gradients.call(first, "forward", 2 * x)
    return gradients.call(first, "forward", x)


def without_a_graph(first, last, x):
    with torch.no_grad():
        assert not gradients.call(first, "forward", x).requires_grad
    return gradients.call(first, "forward", x)


def looked_up_within(first, last, x):
    return gradients.call(first, "looks_up", x) + gradients.call(first, "forward", x)


def unused_within(first, last, x):
    return gradients.call(first, "logs", x) + gradients.call(last, "forward", x)


STEPS = once, by_two_ways, several_results, unused, without_a_graph
STEPS += looked_up_within, unused_within


def take(step, first, last, at=1):
    """The gradients of a step: of its input, and of both objects' parameters."""
    x = torch.tensor(float(at), requires_grad=True)
    with gradients.context() as context:
        gradients.backward(context, step(first, last, x))
        own = gradients.gradients(context, [x])[x].item()
        both = [ref.rpc_sync() for ref in (first, last)]
        left, again = ([ref.leave(context) for ref in both] for _ in "12")
        assert left == again
        for ref in both:
            ref.forget(context)
    return own, *left


def chain(worker="c"):
    """Two objects, which all callers share."""
    last = remote(worker, Scale, 3, name="last")
    return remote("b", Scale, 2, last, name=f"before {worker}"), last


def take_all(at):
    """With two objects on two workers, and both on one."""
    return [take(step, *chain(worker), at) for worker in "cb" for step in STEPS]


def kept(_):
    return len(gradients._kept_graphs)


def skip_steps():
    """Wait until owners keep no graph of steps without a backward pass."""
    first, last = chain()
    x = torch.ones((), requires_grad=True)
    for method in "forward", "fails", "is_missing":
        with suppress(LookupError, AttributeError), gradients.context():
            with suppress(LookupError):
                gradients.call(first, method, x)
            gradients.call(first, "forward", x)
            raise LookupError  # for instance since the loss is no number
    while apply(first, kept) or apply(last, kept):
        time.sleep(0.01)  # owners are told, and nobody waits until they have done it
    return take(once, first, last)


def say(do):
    """What an error says; nothing if there is none."""
    try:
        do()
    except Exception as error:
        return str(error)


def misuse():
    """What is refused, of what could not be right."""
    first, _ = chain()
    x = torch.ones((), requires_grad=True)

    def call(method="forward"):
        return gradients.call(first, method, x)

    said = [say(call)]
    with gradients.context() as context:
        thread = threading.Thread(target=lambda: said.append(say(call)))
        thread.start()
        thread.join()
        said.append(say(gradients.context().__enter__))
        loss = call()
        gradients.backward(context, loss)
        said.append(say(lambda: gradients.backward(context, loss)))
    for method in "fails", "catches":
        with gradients.context() as context:
            with suppress(LookupError):
                call(method)
            loss = call()
            said.append(say(lambda loss=loss: gradients.backward(context, loss)))
    return said


class Own(Exception):
    """It has an attribute, and its own idea of a pickle."""

    def __init__(self, code):
        super().__init__("own")
        self.code = code

    def __reduce__(self):
        return Own, (self.code,)


class Raiser:
    def own(self):
        raise Own(7)

    def local(self):
        raise type("Local", (Exception,), {})

    def leave(self):
        sys.exit(3)

    def unreadable(self):
        raise UnicodeDecodeError("ascii", b"\xff", 0, 1, "no")

    def fail_later(self):
        future = torch.futures.Future()
        future.set_exception(LookupError("later"))
        return future

    def lock(self):
        return threading.Lock()  # which can't be sent


def caught(calls):
    """The kind, the code and the worker of each call's error."""
    seen = []
    for call in calls:
        with pytest.raises(Exception) as error:
            call()
        error = error.value
        worker = error.worker if "Worker" in repr(error) else error.raised_on
        seen.append((type(error).__name__, getattr(error, "code", None), worker))
    return seen


def catch(owner):
    """What a caller gets of what is raised: at once, and by a future."""
    ref = remote(owner, Raiser)
    methods = "own local leave unreadable fail_later lock".split()
    at_once = [getattr(ref.rpc_sync(), method) for method in methods]
    later = [lambda m=m: getattr(ref.rpc_async(), m)().wait() for m in methods]
    return caught(at_once), caught(later)


def wait_in_vain(owner):
    """Wait for an answer that does not come, at once, by a future, and further away."""
    event = remote(owner, threading.Event)
    return caught(
        [
            lambda: event.rpc_sync(timeout=1).wait(5),
            lambda: event.rpc_async(timeout=1).wait(5).wait(),
            lambda: apply(event, wait_further),
        ]
    )


def wait_further(_):
    return remote("c", threading.Event).rpc_sync(timeout=1).wait(5)


def send_parameter():
    """The gradient of a parameter of the caller's that is itself an argument."""
    weight = torch.nn.Parameter(torch.ones(1))
    with gradients.context() as context:
        result = gradients.call(remote("ps", torch.nn.ReLU), "forward", weight)
        gradients.backward(context, 3 * result.sum())
        return gradients.gradients(context, [weight])[weight].item()


def take_part(at):
    """All of the above, beside another who does the same to the same objects."""
    return {
        "gradients": take_all(at),
        "parameter": send_parameter(),
        "skipped": skip_steps(),
        "refused": misuse(),
        "caught": catch("b"),
        "in vain": wait_in_vain("b"),
        "threads": count_threads(),
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
    assert network.current().call("ps", os.getcwd) == os.getcwd()
    return gradient_of_a_marked_function()


def gradient_of_a_marked_function():
    values = torch.ones(3, requires_grad=True)
    tripled = 0.75 * Slow.apply(values).square()
    result = trace.mark_backward("marked", tripled, values)
    with span("between"):
        time.sleep(0.3)
    result.sum().backward()
    trace.mark_until_done("until", partial(later, None, 2.0)).wait()
    return values.grad
