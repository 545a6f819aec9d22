"""The trace: every call through a reference, at both ends, and workers' spans."""

import pytest
import seam_roles
import torch

from cdopt_tutorial.probes import trace
from cdopt_tutorial.run import Role, Trace, launch, serve, span

pytestmark = pytest.mark.xdist_group("trace")
CALLERS = "a", "b"


@pytest.fixture(scope="module")
def recorded():
    """The trace of two workers that call a third at once, and their results."""
    recorded = Trace()
    both = Role(seam_roles.converse)
    roles = {**dict.fromkeys(CALLERS, both), "ps": Role(serve)}
    return recorded, launch(roles, trace=recorded)


def test_every_kind_of_call_is_there(recorded):
    trace, _ = recorded
    both = {(call.caller, call.callee) for call in trace.calls}
    assert both == {("a", "ps"), ("b", "ps")}
    expected = ["Callee", "add", "fail", "sleep", "answer_later", *2 * ["Counter.add"]]
    expected += ["add_later", "raise_error", "allocate_lock", "locked", "getcwd"]
    for caller in CALLERS:
        methods = [call.method for call in trace.calls if call.caller == caller]
        assert methods == expected  # in this order


def test_the_four_moments_are_in_order(recorded):
    seconds = {"sleep": 0.1, "answer_later": 0.3}  # whether it waits or answers later
    for call in recorded[0].calls:
        assert call.sent < call.started <= call.ended < call.received
        least = seconds.get(call.method, 0)
        assert call.ended - call.started > 0.97e9 * least
    sent = [call.sent for call in recorded[0].calls]
    started = [each.started for each in recorded[0].spans]
    assert sent == sorted(sent) and started == sorted(started)


def test_bytes_of_a_call_are_its_own_and_its_answer_s(recorded):
    sizes = {call.method: call.bytes for call in recorded[0].calls}
    assert 2 * 4000 < sizes["add"] < 2 * 4000 + 300  # a thousand numbers both ways
    assert 0 < sizes["locked"] < 300


def test_what_a_worker_marks_is_a_span(recorded):
    trace, results = recorded
    for caller in CALLERS:
        assert torch.equal(results[caller], torch.full((3,), 6.0))
        spans = [span for span in trace.spans if span.worker == caller]
        assert [s.name for s in spans] == ["calling", "between", "marked", "until"]
        calling, between, marked, until = spans
        (add,) = (c for c in trace.calls if (c.caller, c.method) == (caller, "add"))
        assert calling.started <= add.sent < add.received <= calling.ended
        # The backward pass alone, without the forward pass and what came between, and
        # all of it: its last operation takes 0.1 s.
        assert between.ended <= marked.started
        assert 0.1e9 < marked.ended - marked.started
        assert marked.ended <= until.started < until.ended - 0.1e9


def test_without_a_trace_nothing_is_recorded():
    with span("ignored"):
        assert trace.collect() is None
    gradient = seam_roles.gradient_of_a_marked_function()
    assert torch.equal(gradient, torch.full((3,), 6.0))
    assert trace.collect() is None
