"""The trace: every call, at both ends, and nothing where none is recorded."""

import json

import pytest
import roles
import torch
from torch.distributed.rpc import api
from torch.distributed.rpc.internal import _internal_rpc_pickler

from cdopt_tutorial.engines import Role, Trace, launch, serve, span, trace


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


def test_spans(recorded):
    recorded = Trace()
    launch(
        {"a": Role(roles.call, ("other", "add", torch.ones(1))), "other": Role(serve)},
        trace=recorded,
    )
    (marked,) = recorded.spans
    call = recorded.calls[-1]
    assert (marked.worker, marked.name) == ("a", "calling")
    assert marked.started <= call.sent < call.received <= marked.ended


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
    # A request and a response each: an arrow that starts and finishes.
    starts = sorted(e["id"] for e in events if e["ph"] == "s")
    assert starts == sorted(e["id"] for e in events if e["ph"] == "f")
    assert starts == list(range(2 * len(recorded.calls)))
    by_row = {}
    for e in sorted(slices, key=lambda e: e["ts"]):
        end = by_row.get((e["pid"], e["tid"]), 0)
        assert e["ts"] >= end - 1e-6  # slices of one row never overlap
        by_row[e["pid"], e["tid"]] = e["ts"] + e["dur"]
