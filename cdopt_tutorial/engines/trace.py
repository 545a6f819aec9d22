"""Who called whom, and when.

torch's profiler does not follow RPC, so the calls are recorded here, at both ends.
Recording hooks into the three names of ``torch.distributed.rpc.api`` through which
every Python call leaves a worker; it covers ``rpc_sync``, ``rpc_async``, ``remote``,
the proxies of an RRef, ``RemoteModule`` and ``DistributedOptimizer``. Not seen are the
messages that torch's C++ core sends by itself: reference counts of RRefs and the
backward pass of distributed autograd. Without a trace nothing is hooked. Bytes are
counted by the sockets, see :mod:`~cdopt_tutorial.engines.wire`.

The clock is ``time.monotonic_ns``, which the processes of one host share.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.rpc import api, rref_proxy
from torch.distributed.rpc.internal import PythonUDF

from cdopt_tutorial.engines import attach

# With these torch itself keeps init_rpc and shutdown in step; no system makes them.
_BARRIER = ("_gather_to_leader", "_broadcast_to_followers")

# The book's helpers that run something for a caller, and which argument that is.
_HELPERS = {
    ("cdopt_tutorial.engines.reference", "serve_call"): 1,
    ("cdopt_tutorial.engines.reference", "_apply"): 0,
    ("cdopt_tutorial.engines.torch_rpc", "_make"): 1,
}


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
        begin, end = self.started, self.ended
        return Call(self.worker, self.worker, self.name, begin, begin, end, end)


@dataclass
class Trace:
    """Every call of one run; pass it to ``launch``, read it afterwards.

    Attributes:
        workers: names in the order of their ranks.
        calls: in the order in which they were sent.
        spans: what workers marked by :func:`span`, in order of their starts.
    """

    workers: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def fill(self, records: list["Record"]) -> None:
        """Join what the workers of a run recorded; called by ``launch``."""
        answers = {key: at for record in records for key, at in record.answers.items()}
        calls = [
            Call(record.worker, q.callee, q.method, q.sent, *answers[key], q.received)
            for record in records
            for key, q in record.questions.items()
            # A call without an answer was cut off by the end of the run.
            if key in answers and q.received
        ]
        spans = [span for record in records for span in record.spans]
        begin = min([c.sent for c in calls] + [s.started for s in spans], default=0)
        self.workers = [record.worker for record in records]
        self.calls = [_since(begin, c) for c in sorted(calls, key=lambda c: c.sent)]
        self.spans = [_since(begin, s) for s in sorted(spans, key=lambda s: s.started)]

    def chrome(self) -> dict[str, Any]:
        """The trace in Chrome's JSON format, which Perfetto opens; times in µs."""
        events = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": worker}}
            for pid, worker in enumerate(self.workers)
        ]
        lanes = _Lanes(self.workers)
        for number, call in enumerate(self.calls):
            events += _chrome_call(number, call, lanes)
        for span in self.spans:
            events.append(lanes.slice(span.worker, span.name, span.started, span.ended))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace to a file."""
        Path(path).write_text(json.dumps(self.chrome()))


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
        _note_span(name, started)


def _note_span(name: str, started: int) -> None:
    ended = time.monotonic_ns()
    _record.spans.append(Span(_record.worker, name, started, ended))


def mark(function: Callable, name: str) -> None:
    """Mark each run of a system's function in the trace; called by what attaches."""

    def around(function: Callable, *args: Any, **kwargs: Any) -> Any:
        with span(name):
            return function(*args, **kwargs)

    _wrap(function, around)


def mark_backward(function: Callable, name: str) -> None:
    """Mark each backward pass through the tensor that a function returns.

    Called by what attaches. Timed is the last operation that made the tensor.
    """

    def around(function: Callable, *args: Any, **kwargs: Any) -> Tensor:
        return span_backward(function(*args, **kwargs), name)

    _wrap(function, around)


def mark_until(function: Callable, name: str) -> None:
    """Mark the time until the future is done that a function returns.

    Called by what attaches.
    """

    def around(function: Callable, *args: Any, **kwargs: Any) -> torch.futures.Future:
        return span_until(function(*args, **kwargs), name)

    _wrap(function, around)


def _wrap(function: Callable, around: Callable) -> None:
    if _record is not None:
        attach.wrap(function, around)


def recording() -> bool:
    """Whether this process records a trace."""
    return _record is not None


def span_backward(result: Tensor, name: str) -> Tensor:
    """Mark when a gradient passes back through what made a tensor; returns it."""
    node = result.grad_fn
    if _record is not None and node is not None:
        begun: list[int] = []
        node.register_prehook(lambda _: begun.append(time.monotonic_ns()))
        node.register_hook(lambda *_: _note_span(name, begun.pop()))
    return result


def span_until(future: torch.futures.Future, name: str) -> torch.futures.Future:
    """Mark, in the trace, the time from now until a future is done; returns it."""
    if _record is not None:
        started = time.monotonic_ns()
        future.add_done_callback(lambda _: _note_span(name, started))
    return future


@dataclass
class _Question:
    callee: str
    method: str
    sent: int = 0
    received: int = 0


@dataclass
class Record:
    """One worker's halves of its calls, by the call's identity."""

    worker: str
    questions: dict[str, _Question] = field(default_factory=dict)
    # Of the calls that it answered, when they started and ended.
    answers: dict[str, tuple[int, int]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


_record: Record | None = None  # this worker's, while it records
_numbers = itertools.count()
_thread = threading.local()  # the call that this thread is about to send


def install(worker: str) -> None:
    """Begin to record in this process; called before it joins the group."""
    global _record
    _record = Record(worker)
    api._default_pickler = _Pickler(api._default_pickler)
    api._invoke_rpc_python_udf = _hooked(
        api._invoke_rpc_python_udf, lambda future: future
    )
    api._invoke_remote_python_udf = _hooked(
        api._invoke_remote_python_udf, lambda rref: rref._get_future()
    )


def collect() -> Record | None:
    """What this process recorded; None where nothing was installed."""
    return _record


class _Pickler:
    """torch's pickler, except that it gives each call that it packs an identity."""

    def __init__(self, pickler):
        self._pickler = pickler

    def serialize(self, content: Any):
        _thread.pending = None
        if isinstance(content, PythonUDF) and _method(content) not in _BARRIER:
            key = f"{_record.worker}/{next(_numbers)}"
            _thread.pending = key, _method(content)
            content = PythonUDF(
                _answer, (key, content.func, content.args, content.kwargs), {}
            )
        return self._pickler.serialize(content)

    def deserialize(self, *content: Any):
        return self._pickler.deserialize(*content)


def _hooked(invoke: Callable, future_of: Callable) -> Callable:
    """The function that sends, wrapped to note when a call leaves and returns."""

    def send(to, *content):
        if _thread.pending is None:
            return invoke(to, *content)
        key, method = _thread.pending
        question = _record.questions[key] = _Question(to.name, method)
        question.sent = time.monotonic_ns()
        sent = invoke(to, *content)

        def note(_) -> None:
            question.received = time.monotonic_ns()

        future_of(sent).add_done_callback(note)
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
    called = call.func
    module, name = (getattr(called, at, "") for at in ("__module__", "__name__"))
    if module == rref_proxy.__name__:
        called = call.args[1]
    elif (module, name) in _HELPERS:
        called = call.args[_HELPERS[module, name]]
    if isinstance(called, str):
        return called
    return getattr(called, "__qualname__", type(called).__name__)


class _Lanes:
    """Rows for a worker's slices, so that those which overlap do not share one."""

    def __init__(self, workers: list[str]):
        self._pids = {worker: pid for pid, worker in enumerate(workers)}
        self._ends: dict[int, list[int]] = {pid: [] for pid in self._pids.values()}

    def slice(self, worker: str, name: str, start: int, end: int) -> dict:
        pid = self._pids[worker]
        ends = self._ends[pid]
        tid = next((row for row, free in enumerate(ends) if free <= start), len(ends))
        ends[tid : tid + 1] = [end]
        return {
            "ph": "X", "name": name, "pid": pid, "tid": tid,
            "ts": start / 1000, "dur": (end - start) / 1000,
        }  # fmt: skip


def _chrome_call(number: int, call: Call, lanes: _Lanes) -> list[dict]:
    """A slice at each end, and an arrow each way."""
    asked = lanes.slice(call.caller, call.method, call.sent, call.received)
    ran = lanes.slice(call.callee, call.method, call.started, call.ended)
    request = _arrow("request", 2 * number, asked, call.sent, ran, call.started)
    response = _arrow("response", 2 * number + 1, ran, call.ended, asked, call.received)
    return [asked, ran, *request, *response]


def _arrow(name: str, key: int, source: dict, left: int, target: dict, came: int):
    ends = ("s", source, left, {}), ("f", target, came, {"bp": "e"})
    return [
        {
            "name": name, "cat": "rpc", "id": key, "ph": phase,
            "pid": row["pid"], "tid": row["tid"], "ts": at / 1000, **more,
        }
        for phase, row, at, more in ends
    ]  # fmt: skip
