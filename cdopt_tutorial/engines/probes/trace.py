"""Who called whom, and when: recorded at both ends, by the clock that a host shares.

Hooks into the three names of ``torch.distributed.rpc.api`` through which every Python
call leaves. What torch's C++ core sends is not seen: distributed autograd's backward
pass, and what counts an RRef's users. Bytes are counted by ``wire``.
"""

import copy
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.rpc import api, rref_proxy
from torch.distributed.rpc.internal import PythonUDF

# With these torch itself keeps init_rpc and shutdown in step; no system makes them.
_BARRIER = ("_gather_to_leader", "_broadcast_to_followers")

# Whose functions, torch's and the book's, run for a caller their second argument.
_HELPERS = [f"cdopt_tutorial.engines.{name}" for name in ("seam.reference", "workers")]
_HELPERS.append(rref_proxy.__name__)


@dataclass(frozen=True)
class Call:
    """One RPC. Times are in ns since the first event of the trace."""

    caller: str  #: name of the worker that called
    callee: str  #: name of the worker that answered
    method: str  #: the function or method called
    sent: int  #: when the caller handed it to torch
    started: int  #: when the callee began to run it
    ended: int  #: when the callee had its result
    received: int  #: when the caller had the answer


@dataclass(frozen=True)
class Span:
    """Work of one worker under a name. Times are in ns since the first event."""

    worker: str
    name: str
    started: int
    ended: int

    def as_call(self) -> Call:
        """The same as a call of the worker to itself, for a timeline."""
        times = self.started, self.started, self.ended, self.ended
        return Call(self.worker, self.worker, self.name, *times)


@dataclass
class Trace:
    """Every call of one run; pass it to ``launch``, read it afterwards."""

    workers: list[str] = field(default_factory=list)  #: in the order of their ranks
    calls: list[Call] = field(default_factory=list)  #: in the order of their sending
    spans: list[Span] = field(default_factory=list)  #: in the order of their starts

    def fill(self, records: list["Record"]) -> None:
        """Join what the workers of a run recorded; called by ``launch``."""
        answers = {key: at for record in records for key, at in record.answers.items()}
        calls = [
            Call(record.worker, *asked, *answers[key], record.received[key])
            for record in records
            for key, asked in record.asked.items()
            # A call without an answer was cut off by the end of the run.
            if key in answers and key in record.received
        ]
        spans = [span for record in records for span in record.spans]
        begin = min([c.sent for c in calls] + [s.started for s in spans], default=0)
        self.workers = [record.worker for record in records]
        self.calls = [_since(begin, c) for c in sorted(calls, key=lambda c: c.sent)]
        self.spans = [_since(begin, s) for s in sorted(spans, key=lambda s: s.started)]

    def save(self, path: str | Path) -> None:
        """Write the trace in Chrome's JSON format, which Perfetto opens."""
        chrome = _Chrome(self.workers)
        for call in self.calls:
            asked = chrome.slice(call.caller, call.method, call.sent, call.received)
            ran = chrome.slice(call.callee, call.method, call.started, call.ended)
            chrome.arrow("request", asked, call.sent, ran, call.started)
            chrome.arrow("response", ran, call.ended, asked, call.received)
        for span in self.spans:
            chrome.slice(span.worker, span.name, span.started, span.ended)
        content = {"traceEvents": chrome.events, "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(content))


class _Chrome:
    """The events of a file in Chrome's format, which counts in µs."""

    def __init__(self, workers: list[str]):
        self._pids = {worker: pid for pid, worker in enumerate(workers)}
        self._ends: list[list[int]] = [[] for _ in workers]
        self._arrows = itertools.count()
        self.events: list[dict] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": worker}}
            for worker, pid in self._pids.items()
        ]

    def slice(self, worker: str, name: str, start: int, end: int) -> dict[str, int]:
        """In a row that is free; returns its place."""
        ends = self._ends[self._pids[worker]]
        row = next((row for row, free in enumerate(ends) if free <= start), len(ends))
        ends[row : row + 1] = [end]
        place = {"pid": self._pids[worker], "tid": row}
        times = {"ts": start / 1000, "dur": (end - start) / 1000}
        self.events.append({"ph": "X", "name": name, **place, **times})
        return place

    def arrow(self, name: str, source: dict, left: int, target: dict, came: int):
        event = {"name": name, "cat": "rpc", "id": next(self._arrows)}
        start = {"ph": "s", **source, "ts": left / 1000}
        end = {"ph": "f", **target, "ts": came / 1000, "bp": "e"}
        self.events += [event | start, event | end]


def _since(begin: int, event: Call | Span) -> Any:
    times = {k: v - begin for k, v in vars(event).items() if isinstance(v, int)}
    return replace(event, **times)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Mark a worker's own work in the trace; does nothing where none is recorded."""
    if _record is None:
        yield
        return
    started = time.monotonic_ns()
    try:
        yield
    finally:
        _record.note(name, started)


def mark_backward(name: str, result: Tensor, *args: Any) -> Tensor:
    """The result, whose backward pass as far as the arguments is a span of its own.

    Called by whoever computed the result from the arguments, on its worker; without a
    trace, or a graph, it does nothing.
    """
    if _record is not None and result.grad_fn is not None:
        _mark_nodes(_nodes(result, args), name)
    return result


def _nodes(result: Tensor, args: Iterable) -> list:
    """Autograd's nodes from a result back to arguments and leaves, the result's first.

    An argument that came from another worker ends here, at its node "recv".
    """
    given = {arg.grad_fn for arg in args if isinstance(arg, Tensor)}
    found, todo = [], [result.grad_fn]
    while todo:
        node = todo.pop()
        leaf = node is None or hasattr(node, "variable")
        if not leaf and node not in given and node not in found:
            found.append(node)
            todo += [function for function, _ in node.next_functions]
    return found


def _mark_nodes(nodes: list, name: str) -> None:
    starts: list[int] = []
    number, done = len(nodes), itertools.count(1)

    def end(*_: Any) -> None:  # must not hold the nodes, which hold it
        if next(done) == number:
            _record.note(name, starts.pop())

    nodes[0].register_prehook(lambda _: starts.append(time.monotonic_ns()))
    for node in nodes:
        node.register_hook(end)


def mark_until_done(name: str, future: torch.futures.Future) -> torch.futures.Future:
    """The future; a span lasts from now until it is done, where a trace is recorded."""
    if _record is not None:
        started = time.monotonic_ns()
        future.add_done_callback(lambda _: _record.note(name, started))
    return future


def recording() -> bool:
    """Whether this process records a trace."""
    return _record is not None


@dataclass
class Record:
    """One worker's halves of its calls, by the call's identity."""

    worker: str
    asked: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def note(self, name: str, started: int) -> None:
        """Add a span that ends now."""
        self.spans.append(Span(self.worker, name, started, time.monotonic_ns()))


_record: Record | None = None  # this worker's, while it records
_numbers = itertools.count()
_thread = threading.local()  # the call that this thread is about to send


def install(worker: str) -> None:
    """Begin to record in this process; called before it joins the group."""
    global _record
    _record = Record(worker)
    api._default_pickler = copy.copy(api._default_pickler)
    api._default_pickler.serialize = _numbered(api._default_pickler.serialize)
    for name in ("_invoke_rpc_python_udf", "_invoke_remote_python_udf"):
        setattr(api, name, _hooked(getattr(api, name)))


def collect() -> Record | None:
    """What this process recorded; None where nothing was installed."""
    return _record


def _numbered(serialize: Callable) -> Callable:
    def pack(content: Any) -> Any:
        """torch's way to pack, except that it gives each call an identity."""
        _thread.pending = None
        if isinstance(content, PythonUDF) and _method(content) not in _BARRIER:
            key = f"{_record.worker}/{next(_numbers)}"
            _thread.pending = key, _method(content)
            asked = key, content.func, content.args, content.kwargs
            content = PythonUDF(_answer, asked, {})
        return serialize(content)

    return pack


def _hooked(invoke: Callable) -> Callable:
    def send(to, *content):
        """What torch sends by, but it notes when a call leaves and returns."""
        if _thread.pending is None:
            return invoke(to, *content)
        key, method = _thread.pending
        times = _record.received
        _record.asked[key] = to.name, method, time.monotonic_ns()
        sent = invoke(to, *content)
        future = sent._get_future() if hasattr(sent, "_get_future") else sent  # an RRef
        future.add_done_callback(lambda _: times.update({key: time.monotonic_ns()}))
        return sent

    return send


def _answer(key: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Runs on the callee: the call itself, with the moments noted."""
    started = time.monotonic_ns()

    def note(_=None) -> None:
        _record.answers[key] = started, time.monotonic_ns()

    try:
        result = function(*args, **kwargs)
    finally:
        note()
    if isinstance(result, torch.futures.Future):  # of a function that answers later
        result.add_done_callback(note)
    return result


def _method(call: PythonUDF) -> str:
    """The name of what is called."""
    helps = getattr(call.func, "__module__", "") in _HELPERS
    called = call.args[1] if helps else call.func
    name = getattr(called, "__qualname__", type(called).__name__)
    return called if isinstance(called, str) else name
