"""Roles of ``test_reported``; importable by the workers."""

import os
import sys
import threading
from contextlib import suppress

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from cdopt_tutorial import scratch
from cdopt_tutorial.calls import apply, gradients, network, remote
from cdopt_tutorial.run import Role, launch, serve


class Scale(nn.Module):
    """Multiplies by its weight, and adds what others make of that."""

    def __init__(self, weight, *others):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))
        self.others = others

    def forward(self, x):
        x = x * self.weight
        return x + sum(gradients.call(each, "forward", x) for each in self.others)

    def also_logs(self, x):
        return {"logged": 2 * self(x), "x": [self(x)]}

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


STEPS = once, by_two_ways, unused, without_a_graph


def gradient_of(module, context):
    found = gradients.take_sum([context], [module.weight])[module.weight].item()
    module.weight.grad = None  # in one process
    return found


def take(step, first, last):
    """The gradients of a step: of its input, and of both weights."""
    x = torch.ones((), requires_grad=True)
    with gradients.context() as context:
        gradients.backward(context, step(first, last, x))
        own = gradients.gradients(context, [x])[x].item()
        return own, *(apply(each, gradient_of, context) for each in (first, last))


def chain():
    last = remote("c", Scale, 3)
    return remote("b", Scale, 2, last), last


def take_all():
    return [take(step, *chain()) for step in STEPS]


def kept(_):
    return len(gradients._kept_graphs)


def skip_steps():
    """How many graphs owners keep of steps without a backward pass."""
    first, last = chain()
    x = torch.ones((), requires_grad=True)
    for method in "forward", "fails", "is_missing":
        with suppress(LookupError, AttributeError), gradients.context():
            with suppress(LookupError):
                gradients.call(first, method, x)
            gradients.call(first, "forward", x)
            raise LookupError  # for instance since the loss is no number
    gone = apply(first, kept), apply(last, kept)
    # Of a step that has failed nobody waits for an answer.
    return {"again": take(once, first, last), "kept": gone}


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
    with gradients.context() as context:
        with suppress(LookupError):
            call("fails")
        loss = call()
        said.append(say(lambda: gradients.backward(context, loss)))
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


def catch(owner):
    """What a caller gets of what is raised: at once, and by a future."""
    ref, seen = remote(owner, Raiser), []
    for method in "own", "local", "leave", "unreadable":
        for call in (
            lambda method: getattr(ref.rpc_sync(), method)(),
            lambda method: getattr(ref.rpc_async(), method)().wait(),
        ):
            try:
                call(method)
            except Exception as error:
                seen.append((type(error).__name__, getattr(error, "code", None)))
    return seen


def wait_twice(owner):
    """Wait for an answer that does not come, at once and by a future."""
    event, seen = remote(owner, threading.Event), []
    for call in (
        lambda: event.rpc_sync(timeout=1).wait(5),
        lambda: event.rpc_async(timeout=1).wait(5).wait(),
    ):
        try:
            call()
        except RuntimeError as error:
            seen.append(type(error).__name__)
    return seen


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return float(index)


def load():
    batches = DataLoader(Numbers(), 4, num_workers=2, timeout=60)
    return sum(batch.sum().item() for batch in batches)


def write_in_every_way():
    sys.stdout.reconfigure(line_buffering=True)
    sys.stdout.buffer.write(b"bytes\n")
    os.write(sys.stdout.fileno(), b"descriptor\n")
    assert sys.stdout.writable() and sys.stdout.encoding.lower() == "utf-8"


def launch_inside():
    launch({"c": Role(abs, (-3,)), "d": Role(serve)})
    return scratch.folder()


def call_a_function():
    here = network.current()
    return here.call("b", os.getcwd), here.call("b", abs, (-1,))


def state():
    return os.environ.get("OF_A_TEST"), os.sched_getaffinity(0), os.getcwd()


def end_by(number):
    os.kill(os.getpid(), number)
