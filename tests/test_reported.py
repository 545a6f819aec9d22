"""What users of launchers, calls and gradients across workers report as broken."""

import os
from importlib.util import find_spec

import pytest
import reported_roles
from hosts import PATIENCE

from cdopt_tutorial.calls import alone, gradients
from cdopt_tutorial.calls.rendezvous import Rendezvous
from cdopt_tutorial.run import Role, Trace, launch, serve

pytestmark = pytest.mark.usefixtures("limited")

ray = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
#: How calls travel, and what is attached to the workers.
CUT = pytest.param("rpc", gradients.cut_always, id="cut")
RAY = pytest.param("ray", None, id="Ray", marks=ray)
WAYS = [pytest.param("rpc", None, id="distributed"), CUT, RAY]


def played(function, *args, **options):
    """What a role returns that has two workers beside it."""
    system = {"a": Role(function, args), "b": Role(serve), "c": Role(serve)}
    return launch(system, **options)["a"]


class TestGradients:
    @pytest.mark.parametrize("on, attach", WAYS)
    def test_of_every_step_are_those_of_one_process(self, on, attach):
        """With calls within calls, results that the loss does not use, and no_grad."""
        found = played(reported_roles.take_all, on=on, attach=attach)
        with alone():
            assert found == reported_roles.take_all()
        assert found[0] == (8, 4, 2)  # of 2 x + 3 (2 x)

    @pytest.mark.parametrize("on, attach", [CUT, RAY])
    def test_of_steps_that_are_skipped_or_fail_nothing_is_kept(self, on, attach):
        skip = reported_roles.skip_steps
        assert played(skip, on=on, attach=attach, deadline=PATIENCE) == (8, 4, 2)

    def test_what_could_not_be_right_is_refused(self):
        """And neither waits for ever nor has no gradient."""
        outside, in_thread, inside, again, *failed = played(reported_roles.misuse)
        assert "a call with a gradient needs a context" in outside
        assert in_thread == outside
        assert "Already have an autograd context id for this thread" in inside
        assert "a context is for one backward pass" in again
        for said in failed:  # of the second one only the callee knows
            assert "a call of this context has failed" in said

    def test_a_context_within_one_is_refused_where_graphs_are_cut(self):
        said = played(reported_roles.nest, attach=gradients.cut_always)
        assert said == "this thread is in a context of gradients already"


class TestCalls:
    @pytest.mark.parametrize("on", ["rpc", pytest.param("ray", marks=ray)])
    def test_raise_what_the_callee_raised_if_that_can_be_sent(self, on):
        no_result = {"rpc": "RuntimeError", "ray": "TypeError"}[on]
        kinds = "Own", "WorkerError", "WorkerError", "UnicodeDecodeError", no_result
        codes = 7, *(None,) * 4
        expected = [(*of, "b") for of in zip(kinds, codes, strict=True) for _ in "12"]
        assert played(reported_roles.catch, "b", on=on) == expected

    @pytest.mark.parametrize("on", ["rpc", pytest.param("ray", marks=ray)])
    def test_have_a_time_out_at_once_or_later(self, on):
        found = played(reported_roles.wait_in_vain, "b", on=on)
        assert found == [("WorkerSilent", silent) for silent in "bbc"]

    def test_of_plain_functions_are_traced_too(self):
        found = played(reported_roles.call_a_function, trace=(trace := Trace()))
        assert found == (os.getcwd(), 1)
        assert [call.method for call in trace.calls] == ["getcwd", "abs"]

    @pytest.mark.parametrize("answers", [{1: "one"}, None], ids=["one", "none"])
    def test_that_meet_are_all_told_if_some_have_no_answer(self, answers):
        met = Rendezvous(lambda brought: answers, (1, 2))
        for future in [met.enter(1), met.enter(2)]:
            with pytest.raises((KeyError, TypeError)):
                future.wait()


@pytest.mark.parametrize("on", [pytest.param("ray", marks=ray)])
def test_a_process_that_launches_may_itself_be_a_job_of_ray(on, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setenv("RAY_NAMESPACE", "elsewhere")
    assert played(abs, -1, on=on) == 1
