"""Who called whom, and when: recorded at both ends, by the host's one clock.

A traced worker notes each call that it makes by torch RPC, also through a reference or
an ``RRef``, and by torch's own functions. It misses the making of an ``RRef``, and what
torch sends otherwise, such as distributed autograd's backward pass. ``wire`` counts the
bytes of a whole run, envelopes included.
"""

import io
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.rpc import PyRRef, api, functions
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from cdopt_tutorial.calls import network


@dataclass(frozen=True)
class Call:
    """One call. Times are in ns, by the clock of the host."""

    caller: str  #: name of the worker that called
    callee: str  #: name of the worker that answered
    method: str  #: the function or method called
    sent: int  #: when the caller gave it to the network
    started: int  #: when the callee began to run it
    ended: int  #: when the callee had its result
    received: int  #: when the caller had the result
    bytes: int = 0  #: that it carried there and back, without torch's envelope


@dataclass(frozen=True)
class Span:
    """Work of one worker under a name. Times are in ns, by the clock of the host."""

    worker: str
    name: str
    started: int
    ended: int

    def as_call(self) -> Call:
        """As a call of the worker to itself, for a timeline."""
        times = self.started, self.started, self.ended, self.ended
        return Call(self.worker, self.worker, self.name, *times)


@dataclass
class Trace:
    """Every call of one run; pass it to ``launch``, read it afterwards."""

    calls: list[Call] = field(default_factory=list)  #: sorted by ``sent``
    spans: list[Span] = field(default_factory=list)  #: sorted by ``started``

    def fill(self, parts: list["Trace"]) -> None:
        """Merge what the workers of a run recorded; called by ``launch``."""
        calls = [call for part in parts for call in part.calls]
        spans = [span for part in parts for span in part.spans]
        self.calls = sorted(calls, key=lambda call: call.sent)
        self.spans = sorted(spans, key=lambda span: span.started)


_own: Trace | None = None  # this worker's, if it records one
_name = ""  # of this worker


def collect() -> Trace | None:
    """What this process recorded, if it did."""
    return _own


@contextmanager
def span(name: str) -> Iterator[None]:
    """Mark a worker's own work in the trace; without a trace it does nothing."""
    started = time.monotonic_ns()
    try:
        yield
    finally:
        _note(name, started)


def mark_backward(name: str, result: Tensor, *args: Any) -> Tensor:
    """Make the backward pass from a result to the arguments a span; return the result.

    Called on the worker that computed the result from the arguments; without a trace,
    or a graph, it does nothing.
    """
    if _own is None or result.grad_fn is None:
        return result
    starts = list[int]()
    nodes: list[Any] = [result.grad_fn]
    # Not an argument's, which may be of another worker, nor those of leaves.
    others = {None, *(arg.grad_fn for arg in args if isinstance(arg, Tensor))}
    for node in nodes:
        for behind, _ in node.next_functions:
            if not hasattr(behind, "variable") and behind not in (*others, *nodes):
                nodes.append(behind)
    left = itertools.count(len(nodes) - 1, -1)

    def end(*_: Any) -> None:  # must not refer to the nodes, which refer to it
        if next(left) == 0:
            _note(name, starts.pop())

    nodes[0].register_prehook(lambda _: starts.append(time.monotonic_ns()))
    for node in nodes:
        node.register_hook(end)
    return result


def mark_until_done(name: str, begin: Callable[[], Future]) -> Future:
    """Make the time from a call until its future is done a span; return the future."""
    started = time.monotonic_ns()
    future = begin()
    if _own is not None:
        future.add_done_callback(lambda _: _note(name, started))
    return future


def _note(name: str, started: int) -> None:
    if _own is not None:
        _own.spans.append(Span(_name, name, started, time.monotonic_ns()))


def begin(worker: str) -> None:
    """Record what this process does from now on, as a worker."""
    global _own, _name
    if _own is None:  # through which torch's every call of a function passes
        api._invoke_rpc = partial(_invoke, api._invoke_rpc)
    _own, _name = Trace(), worker


def _invoke(
    plain: Callable,
    to: Any,
    function: Callable,
    rpc_type: Any,
    args: tuple | None = None,
    kwargs: dict | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future:
    """In place of torch's own: have the callee note when it begins and ends."""
    args, kwargs = args or (), kwargs or {}
    if function.__module__ == api.__name__:  # torch's own, as workers join and leave
        return plain(to, function, rpc_type, args, kwargs, timeout)
    callee = api._to_worker_info(to).name
    method, carried = _call_of(function, args)
    sent = time.monotonic_ns()

    def note(answer: Future) -> Any:
        result, started, ended = answer.value()
        times = sent, started, ended, time.monotonic_ns()
        size = _bytes(carried) + _bytes(result)
        if _own is not None:
            _own.calls.append(Call(_name, callee, method, *times, size))
        return network.received(result)

    call = _name, function, args, kwargs
    return network.then(plain(to, _timed, rpc_type, call, None, timeout), note)


@functions.async_execution
def _timed(caller: str, function: Callable, args: tuple, kwargs: dict) -> Future:
    """Runs on the callee: what the call returned, when it began and when it ended."""
    started = time.monotonic_ns()
    served = network.serve(caller, function, args, kwargs)
    return network.then(served, lambda s: (s.value(), started, time.monotonic_ns()))


# Functions that run others: what their second argument names, with what follows it.
_CARRIERS = (
    *("_make", "serve_call", "_record", "_forward", "_without_graph"),
    *("_local_invoke", "_local_invoke_async_execution"),  # torch's own
)


def _call_of(function: Callable | str, args: tuple) -> tuple[str, tuple]:
    """The name of what a message has its callee run, and the arguments it carries."""
    if isinstance(function, str):
        return function, args
    name = getattr(function, "__qualname__", type(function).__name__)
    if name == "serve":  # of our own network: the caller, then the call
        return _call_of(args[1], args[2])
    if name in _CARRIERS:
        return _call_of(args[1], (args[0], *args[2:]))
    return name, args


def _bytes(value: Any) -> int:
    """A value's size as a message: its pickle, and the elements of its tensors."""
    sizer = _Sizer(stream := io.BytesIO())
    sizer.dump(value)
    return stream.tell() + sizer.numbers


class _Sizer(pickle.Pickler):
    """Pickles as RPC does, which sends tensors separately, and an RRef as a name."""

    numbers = 0  # bytes of tensors

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, Tensor):
            self.numbers += value.nbytes
        return type(value).__name__ if isinstance(value, Tensor | PyRRef) else None
