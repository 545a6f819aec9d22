"""The trace: every call, at both ends, and nothing where none is recorded."""

import json

import pytest
import roles
import torch
from torch.distributed.rpc import api
from torch.distributed.rpc.internal import _internal_rpc_pickler

from cdopt_tutorial.engines import Role, Trace, launch, serve, span
from cdopt_tutorial.engines.probes import trace

pytestmark = pytest.mark.xdist_group("trace")


@pytest.fixture(scope="module")
def recorded():
    recorded = Trace()
    launch(
        {"agent": Role(roles.converse, ("other", 3)), "other": Role(serve)},
        trace=recorded,
    )
    return recorded


def test_every_kind_of_call_is_there(recorded):
    methods = [call.method for call in recorded.calls]
    adds = ["add"] * 4
    expected = ["Counter", "_rref_typeof_on_owner", *adds, "add_later", "identify"]
    assert methods == expected
    assert {(call.caller, call.callee) for call in recorded.calls} == {
        ("agent", "other")
    }
    assert recorded.workers == ["agent", "other"]


def test_the_four_moments_are_in_order(recorded):
    assert recorded.calls[0].sent == 0
    for call in recorded.calls:
        assert call.sent < call.started <= call.ended < call.received


def test_an_object_that_does_not_pickle_can_be_made_elsewhere():
    trace_ = Trace()
    made = Role(roles.make_lock, ("other",))
    launch({"agent": made, "other": Role(serve)}, trace=trace_)
    assert [call.method for call in trace_.calls] == ["allocate_lock", "is_locked"]


def test_a_failing_call_is_recorded_too():
    # The run fails, so its trace stays empty; but the worker must not fail otherwise.
    recorded = Trace()
    with pytest.raises(Exception, match="other raised KeyError"):
        launch(
            {
                "a": Role(roles.call, ("other", "fail", "KeyError")),
                "other": Role(serve),
            },
            trace=recorded,
        )
    assert recorded.calls == []


def recorded_run(**roles_):
    recorded = Trace()
    launch(roles_, trace=recorded)
    return recorded


def test_two_callers_at_once_are_told_apart():
    both = Role(roles.talk, ("other", 5))
    recorded = recorded_run(a=both, b=both, other=Role(serve))
    for caller in "ab":
        own = [call for call in recorded.calls if call.caller == caller]
        assert len(own) == 5
        for number, call in enumerate(own):
            assert call.sent < call.started <= call.ended < call.received
            assert call.ended - call.started >= 0.01e9 * number


def test_of_a_call_that_was_cut_off_nothing_is_left():
    asked = {key: ("other", key, 10 * n) for n, key in enumerate(("no", "yes", "half"))}
    agent = trace.Record("agent", asked, received={"yes": 19, "no": 9})
    other = trace.Record("other", answers={"yes": (12, 15), "half": (22, 25)})
    found = Trace()
    found.fill([agent, other])
    assert found.calls == [trace.Call("agent", "other", "yes", 0, 2, 5, 9)]


def test_a_late_answer_ends_when_it_is_there():
    late = Role(roles.wait_for_late, ("other", 0.3))
    (call,) = [
        call
        for call in recorded_run(a=late, other=Role(serve)).calls
        if call.method == "add_later"
    ]
    assert call.ended - call.started > 0.29e9
    assert call.sent < call.started and call.ended < call.received


def test_calls_by_the_helpers_of_the_book_have_the_name_of_what_they_call():
    calls = recorded_run(a=Role(roles.go_through, ("b",)), b=Role(serve)).calls
    names = [call.method for call in calls]
    assert names == ["Counter", "add", "Counter.add", "Counter", "Counter.add"]


def test_what_a_worker_marks_is_a_span():
    recorded, work = Trace(), {"a": Role(roles.be_marked, ("b",)), "b": Role(serve)}
    grad = launch(work, trace=recorded)["a"]
    assert torch.equal(grad, torch.full((3,), 6.0))
    assert [s.name for s in recorded.spans] == ["call", "calling", "backward", "until"]
    call, calling, backward, until = recorded.spans
    assert {s.worker for s in recorded.spans} == {"a"}
    assert call.started <= calling.started < calling.ended <= call.ended
    # When the answer came is noted by another thread, perhaps after the span.
    add = recorded.calls[-1]
    assert calling.started <= add.sent < add.ended <= calling.ended
    # The backward pass, without the forward pass and what was between, and all of it:
    # the operation that it comes to last takes 0.1 s.
    assert backward.started - call.ended > 0.3e9 > backward.ended - backward.started
    assert backward.ended - backward.started > 0.1e9
    assert backward.ended <= until.started < until.ended - 0.1e9
    # Without a trace nothing is marked.
    assert torch.equal(launch(work)["a"], grad)


def test_off_hooks_nothing():
    with span("ignored"):
        pass
    assert trace.collect() is None
    assert api._default_pickler is _internal_rpc_pickler
    roles_ = {"worker": Role(roles.hooked)}
    assert launch(roles_)["worker"] is False
    assert launch(roles_, trace=Trace())["worker"] is True


def test_chrome_format(recorded, tmp_path):
    recorded.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "agent", 1: "other"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 2 * len(recorded.calls)
    ends = {kind: {e["ts"] for e in events if e["ph"] == kind} for kind in "sf"}
    drawn = {(e["ts"], e["dur"]) for e in slices}
    for call in recorded.calls:  # in µs
        for begin, end in ((call.sent, call.received), (call.started, call.ended)):
            assert (begin / 1000, (end - begin) / 1000) in drawn
        assert {call.sent / 1000, call.ended / 1000} <= ends["s"]
        assert {call.started / 1000, call.received / 1000} <= ends["f"]
    # A request and a response each: an arrow that starts and finishes.
    starts = sorted(e["id"] for e in events if e["ph"] == "s")
    assert starts == sorted(e["id"] for e in events if e["ph"] == "f")
    assert starts == list(range(2 * len(recorded.calls)))
    by_row = {}
    for e in sorted(slices, key=lambda e: e["ts"]):
        end = by_row.get((e["pid"], e["tid"]), 0)
        assert e["ts"] >= end - 1e-6  # slices of one row never overlap
        by_row[e["pid"], e["tid"]] = e["ts"] + e["dur"]


def test_time_begins_with_the_first_event_even_if_it_is_a_span():
    caller, callee, found = trace.Record("a"), trace.Record("b"), Trace()
    caller.spans.append(trace.Span("a", "early", 5, 9))
    caller.asked["a/0"], caller.received["a/0"] = ("b", "add", 7), 20
    callee.answers["a/0"] = 8, 10
    found.fill([caller, callee])
    assert found.spans == [trace.Span("a", "early", 0, 4)]
    assert found.calls == [trace.Call("a", "b", "add", 2, 3, 5, 15)]
