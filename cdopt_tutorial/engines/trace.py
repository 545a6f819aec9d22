"""Who called whom, when, and how many bytes went each way.

torch's profiler does not follow RPC, so the calls are recorded here, at both ends.
Recording hooks into the three names of ``torch.distributed.rpc.api`` through which
every Python call leaves a worker; it covers ``rpc_sync``, ``rpc_async``, ``remote``,
the proxies of an RRef, ``RemoteModule`` and ``DistributedOptimizer``. Not seen are the
messages that torch's C++ core sends by itself: reference counts of RRefs and the
backward pass of distributed autograd. Without a trace nothing is hooked.

The clock is ``time.monotonic_ns``, which the processes of one host share.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.rpc import api, rref_proxy
from torch.distributed.rpc.internal import (
    PythonUDF,
    _internal_rpc_pickler,
    _InternalRPCPickler,
)

from cdopt_tutorial.engines import attach
from cdopt_tutorial.engines.reference import serve_call
from cdopt_tutorial.engines.remote import call_method, call_shared

# With these torch itself keeps init_rpc and shutdown in step; no system makes them.
_BARRIER = ("_gather_to_leader", "_broadcast_to_followers")

_RREF_FORK = (0, 0, 0, 0, 0, 0, "PyObject")  # what travels for an RRef, in shape


@dataclass(frozen=True)
class Call:
    """One RPC. Times are in ns since the first event of the trace.

    Attributes:
        caller: name of the worker that called.
        callee: name of the worker that answered.
        method: the function or method called.
        sent: when the caller handed it to torch.
        started: when the callee began to run it.
        ended: when the callee had its result.
        received: when the caller had the answer.
        request_bytes: pickled function and arguments, and their tensors.
        response_bytes: pickled result, and its tensors.
    """

    caller: str
    callee: str
    method: str
    sent: int
    started: int
    ended: int
    received: int
    request_bytes: int
    response_bytes: int


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
        return Call(self.worker, self.worker, self.name, begin, begin, end, end, 0, 0)


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
        begin = min((time for record in records for time in record.times()), default=0)
        answers = {
            key: answer for record in records for key, answer in record.answers.items()
        }
        self.workers = [record.worker for record in records]
        self.calls = sorted(
            (
                _joined(record.worker, question, answers[key], begin)
                for record in records
                for key, question in record.questions.items()
                # A call without an answer was cut off by the end of the run.
                if key in answers and question.received
            ),
            key=lambda call: call.sent,
        )
        self.spans = sorted(
            (
                Span(record.worker, name, started - begin, ended - begin)
                for record in records
                for name, started, ended in record.spans
            ),
            key=lambda span: span.started,
        )

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
        _record.spans.append((name, started, time.monotonic_ns()))


def mark(function: Callable, name: str) -> None:
    """Mark each run of a system's function in the trace; called by what attaches."""

    def around(function: Callable, *args: Any, **kwargs: Any) -> Any:
        with span(name):
            return function(*args, **kwargs)

    if _record is not None:
        attach.wrap(function, around)


def recording() -> bool:
    """Whether this process records a trace."""
    return _record is not None


def span_backward(result: Tensor, name: str) -> Tensor:
    """Mark, in the trace, when a gradient passes back through what made a tensor.

    Args:
        result: of the last operation, which is the one that is timed.
        name: of the span.

    Returns:
        The tensor.
    """
    node = result.grad_fn
    if _record is not None and node is not None:
        begun: list[int] = []
        node.register_prehook(lambda _: begun.append(time.monotonic_ns()))
        node.register_hook(
            lambda *_: _record.spans.append((name, begun.pop(), time.monotonic_ns()))
        )
    return result


def span_until(future: torch.futures.Future, name: str) -> torch.futures.Future:
    """Mark, in the trace, the time from now until a future is done; returns it."""
    if _record is not None:
        started = time.monotonic_ns()
        future.add_done_callback(
            lambda _: _record.spans.append((name, started, time.monotonic_ns()))
        )
    return future


@dataclass
class _Question:
    callee: str
    method: str
    request_bytes: int
    stays: bool  # the result, with its owner: the call was a ``remote``
    sent: int = 0
    received: int = 0


@dataclass
class _Answer:
    started: int
    ended: int
    response_bytes: int = 0


@dataclass
class Record:
    """One worker's halves of its calls, keyed by the call's identity.

    Attributes:
        worker: who recorded.
        questions: the calls that it made.
        answers: the calls that it answered.
        spans: (name, started, ended) of its own work.
    """

    worker: str
    questions: dict[str, _Question] = field(default_factory=dict)
    answers: dict[str, _Answer] = field(default_factory=dict)
    spans: list[tuple[str, int, int]] = field(default_factory=list)

    def times(self) -> Iterator[int]:
        """All moments that could be the trace's first."""
        yield from (
            question.sent for question in self.questions.values() if question.sent
        )
        yield from (started for _, started, _ in self.spans)


_record: Record | None = None  # this worker's, while it records
_numbers = itertools.count()
_thread = threading.local()  # the call that this thread is about to send


def install(worker: str) -> None:
    """Begin to record in this process; called before it joins the group."""
    global _record
    _record = Record(worker)
    api._default_pickler = _Pickler(api._default_pickler)
    api._invoke_rpc_python_udf = _hooked(
        api._invoke_rpc_python_udf, lambda future: future, stays=False
    )
    api._invoke_remote_python_udf = _hooked(
        api._invoke_remote_python_udf, lambda rref: rref._get_future(), stays=True
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
            _thread.pending = key, _method(content), size(content)
            content = PythonUDF(
                _answer, (key, content.func, content.args, content.kwargs), {}
            )
        return self._pickler.serialize(content)

    def deserialize(self, *content: Any):
        return self._pickler.deserialize(*content)


def _hooked(invoke: Callable, future_of: Callable, stays: bool) -> Callable:
    """The function that sends, wrapped to note when a call leaves and returns."""

    def send(to, *content):
        if _thread.pending is None:
            return invoke(to, *content)
        key, method, request_bytes = _thread.pending
        question = _Question(to.name, method, request_bytes, stays)
        _record.questions[key] = question
        question.sent = time.monotonic_ns()
        sent = invoke(to, *content)

        def note(_) -> None:
            question.received = time.monotonic_ns()

        future_of(sent).add_done_callback(note)
        return sent

    return send


def _answer(key: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Runs on the callee: the call itself, with the moments noted."""
    answer = _record.answers[key] = _Answer(time.monotonic_ns(), 0)
    try:
        result = function(*args, **kwargs)
    finally:
        answer.ended = time.monotonic_ns()
    if isinstance(result, torch.futures.Future):  # of a function that answers later

        def note(future: torch.futures.Future) -> None:
            answer.ended = time.monotonic_ns()
            answer.response_bytes = _answer_size(future.value())

        result.add_done_callback(note)
    else:
        answer.response_bytes = _answer_size(result)
    return result


def _answer_size(result: Any) -> int:
    try:
        return size(result)
    except Exception:  # what can't be pickled stays here, or torch will complain itself
        return 0


def _method(call: PythonUDF) -> str:
    # A proxy sends a helper, with the method's name behind the RRef or the number.
    if call.func is serve_call:
        method = call.args[1]
        return method if isinstance(method, str) else method.__qualname__
    if call.func is call_shared or call.func.__module__ == rref_proxy.__name__:
        return call.args[1]
    function = call.args[0] if call.func is call_method else call.func
    return getattr(function, "__qualname__", type(function).__name__)


class _Sizer(_InternalRPCPickler):
    """torch's pickler for calls, except that it does not touch the RRefs in them."""

    def serialize(self, content: Any):
        """Pickle; a class that has a way of its own on the wire takes it here, too."""
        for kind, reduce in _internal_rpc_pickler._class_reducer_dict.items():
            remote = kind.__name__ == "RemoteModule"
            self._register_reducer(kind, _reduce_remote_module if remote else reduce)
        return super().serialize(content)

    def _py_rref_reducer(self, _):
        # To pickle an RRef for real registers one more user of it with its owner.
        return _InternalRPCPickler._py_rref_receiver, (_RREF_FORK,)


def _reduce_remote_module(module: Any) -> tuple:
    """As torch's own, without its RRef."""
    from torch.distributed.nn.api import remote_module as theirs  # imported by now

    kept = theirs._REMOTE_MODULE_PICKLED_ATTRIBUTES
    attributes = {k: value for k, value in vars(module).items() if k in kept}
    attributes["module_rref"] = _RREF_FORK
    return theirs._remote_module_receiver, tuple(attributes.values())


_sizer = _Sizer()


def size(content: Any) -> int:
    """Bytes that torch sends for an object: its pickle and its tensors' values.

    TensorPipe's own framing is not counted.
    """
    pickled, tensors = _sizer.serialize(content)
    return len(pickled) + sum(tensor.nbytes for tensor in tensors)


def _joined(caller: str, question: _Question, answer: _Answer, begin: int) -> Call:
    return Call(
        caller,
        question.callee,
        question.method,
        question.sent - begin,
        answer.started - begin,
        answer.ended - begin,
        question.received - begin,
        question.request_bytes,
        0 if question.stays else answer.response_bytes,
    )


class _Lanes:
    """Rows for a worker's slices, so that those which overlap do not share one."""

    def __init__(self, workers: list[str]):
        self._pids = {worker: pid for pid, worker in enumerate(workers)}
        self._ends: dict[int, list[int]] = {pid: [] for pid in self._pids.values()}

    def slice(self, worker: str, name: str, start: int, end: int, **args: Any) -> dict:
        pid = self._pids[worker]
        ends = self._ends[pid]
        tid = next((row for row, free in enumerate(ends) if free <= start), len(ends))
        ends[tid : tid + 1] = [end]
        return {
            "ph": "X", "name": name, "pid": pid, "tid": tid,
            "ts": start / 1000, "dur": (end - start) / 1000, "args": args,
        }  # fmt: skip


def _chrome_call(number: int, call: Call, lanes: _Lanes) -> list[dict]:
    """A slice at each end, and an arrow each way."""
    asked = lanes.slice(
        call.caller, call.method, call.sent, call.received, bytes=call.request_bytes
    )
    ran = lanes.slice(
        call.callee, call.method, call.started, call.ended, bytes=call.response_bytes
    )
    return [
        asked,
        ran,
        *_arrow("request", 2 * number, asked, asked["ts"], ran, ran["ts"]),
        *_arrow(
            "response",
            2 * number + 1,
            ran,
            call.ended / 1000,
            asked,
            call.received / 1000,
        ),
    ]


def _arrow(name: str, key: int, source: dict, left: float, target: dict, came: float):
    common = {"name": name, "cat": "rpc", "id": key}
    start = {"ph": "s", "pid": source["pid"], "tid": source["tid"], "ts": left}
    end = {"ph": "f", "bp": "e", "pid": target["pid"], "tid": target["tid"], "ts": came}
    return [common | start, common | end]
