"""Roles of ``test_reported``; importable by the workers."""

import os
import sys
import threading
import time
from contextlib import suppress

import torch
from torch import nn

from cdopt_tutorial.calls import apply, gradients, network, remote


class Scale(nn.Module):
    """Multiplies by its weight, and adds what others make of that."""

    def __init__(self, weight, *others):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))
        self.others = others

    def forward(self, x):
        x = x * self.weight
        return x + sum(gradients.call(each, "forward", x) for each in self.others)

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


def once(first, last, x):
    return gradients.call(first, "forward", x)


def by_two_ways(first, last, x):
    """One object is called from here, and within calls from here."""
    ways = [(r, k) for k in (1, 2, 3) for r in (first, last)]
    return sum(gradients.call(r, "forward", x * k) for r, k in ways)


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


STEPS = once, by_two_ways, unused, without_a_graph, looked_up_within, unused_within


def gradient_of(module, context):
    found = gradients.gradients(context, [module.weight])[module.weight].item()
    module.weight.grad = None  # in one process
    return found


def take(step, first, last):
    """The gradients of a step: of its input, and of both weights."""
    x = torch.ones((), requires_grad=True)
    with gradients.context() as context:
        gradients.backward(context, step(first, last, x))
        own = gradients.gradients(context, [x])[x].item()
        return own, *(apply(each, gradient_of, context) for each in (first, last))


def chain(worker="c"):
    last = remote(worker, Scale, 3)
    return remote("b", Scale, 2, last), last


def take_all():
    """With two objects on two workers, and both on one."""
    return [take(step, *chain(worker)) for worker in "cb" for step in STEPS]


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
    """What an error says."""
    try:
        do()
    except RuntimeError as error:
        return str(error)


def nest():
    with gradients.context():
        return say(gradients.context().__enter__)


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

    def lock(self):
        return threading.Lock()  # which can't be sent


def catch(owner):
    """What a caller gets of what is raised: at once, and by a future."""
    ref, seen = remote(owner, Raiser), []
    for method in "own", "local", "leave", "unreadable", "lock":
        for call in (
            lambda method: getattr(ref.rpc_sync(), method)(),
            lambda method: getattr(ref.rpc_async(), method)().wait(),
        ):
            try:
                call(method)
            except Exception as error:
                named = error.worker if "Worker" in repr(error) else error.raised_on
                kind = type(error).__name__, getattr(error, "code", None)
                seen.append((*kind, named))
    return seen


def wait_in_vain(owner):
    """Wait for an answer that does not come, at once, by a future, and further away."""
    event, seen = remote(owner, threading.Event), []
    for call in (
        lambda: event.rpc_sync(timeout=1).wait(5),
        lambda: event.rpc_async(timeout=1).wait(5).wait(),
        lambda: apply(event, wait_further),
    ):
        try:
            call()
        except RuntimeError as error:
            seen.append((type(error).__name__, error.worker))
    return seen


def wait_further(_):
    return remote("c", threading.Event).rpc_sync(timeout=1).wait(5)


def call_a_function():
    here = network.current()
    return here.call("b", os.getcwd), here.call("b", abs, (-1,))
