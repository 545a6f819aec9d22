"""References, gradients across workers, and rendezvous: all equal one process."""

import pickle
import threading
import weakref
from importlib.util import find_spec

import pytest
import roles
import seam_roles
import torch
from hosts import PATIENCE
from locks import Second
from roles import WAYS

from cdopt_tutorial.calls import (
    alone,
    gradients,
    network,
    reference,
    references,
    remote,
)
from cdopt_tutorial.calls.references import Ref
from cdopt_tutorial.calls.rendezvous import Rendezvous, all_that_was_brought
from cdopt_tutorial.run import Role, launch, serve

INPUTS = 1, 7  # of two callers
RAY = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


@pytest.fixture(scope="module", params=[*WAYS, pytest.param("Ray", marks=RAY)])
def way(request):
    """How calls travel, and gradients with them."""
    return request.param


@pytest.fixture(scope="module")
def found(way):
    """What two callers found, who did everything at once to the same objects."""
    on, attach = ("ray", None) if way == "Ray" else ("rpc", WAYS[way])
    system = {f"a{at}": Role(seam_roles.take_part, (at,)) for at in INPUTS}
    system |= {"b": Role(serve), "c": Role(serve), "ps": Role(serve, num_threads=3)}
    with pytest.MonkeyPatch.context() as patch:
        # As in a process that is itself a job of Ray.
        patch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
        patch.setenv("RAY_NAMESPACE", "elsewhere")
        options = {"rpc_threads": 8, "deadline": PATIENCE}
        results = launch(system, on=on, attach=attach, **options)
    return [results[f"a{at}"] for at in INPUTS]


@pytest.mark.xdist_group("seam")
class TestWorkers:
    def test_gradients_of_every_step_are_those_of_one_process(self, found):
        """With calls within calls, results that the loss does not use, and no_grad."""
        for caller, at in zip(found, INPUTS, strict=True):
            with alone():
                assert caller["gradients"] == seam_roles.take_all(at)
            # Of 2 x + 3 (2 x).
            assert caller["gradients"][0] == (8, {"weight": 4 * at}, {"weight": 2 * at})

    def test_a_parameter_may_be_an_argument(self, found):
        with alone():
            assert seam_roles.send_parameter() == 3
        assert [caller["parameter"] for caller in found] == [3, 3]

    def test_of_steps_that_are_skipped_or_fail_nothing_is_kept(self, found):
        for caller in found:
            assert caller["skipped"] == (8, {"weight": 4}, {"weight": 2})

    def test_what_could_not_be_right_is_refused(self, found, way):
        """And neither waits for ever nor has no gradient."""
        for caller in found:
            outside, in_thread, inside, again, *failed = caller["refused"]
            assert "a call with a gradient needs a context" in outside
            assert in_thread == outside
            if way != "distributed":
                assert inside == "this thread is in a context of gradients already"
                continue
            assert "Already have an autograd context id for this thread" in inside
            assert "a context is for one backward pass" in again
            for said in failed:  # of the second one only the callee knows
                assert "a call of this context has failed" in said

    def test_raise_what_the_callee_raised_if_that_can_be_sent(self, found, way):
        kinds = "Own WorkerError WorkerError UnicodeDecodeError LookupError".split()
        kinds.append("TypeError" if way == "Ray" else "RuntimeError")  # of no result
        expected = [(kind, 7 if kind == "Own" else None, "b") for kind in kinds]
        for caller in found:
            assert caller["caught"] == (expected, expected)

    def test_calls_have_a_time_out_at_once_or_later(self, found):
        for caller in found:
            silent = [("WorkerSilent", None, worker) for worker in "bbc"]
            assert caller["in vain"] == silent

    def test_calls_and_their_ways_back_take_the_threads_of_the_role(self, found, way):
        # Even the first in its thread, before any parallel operator.
        for caller in found:
            assert len(caller["threads"]) >= 20
            assert way == "Ray" or set(caller["threads"]) == {3}

    def test_references_have_the_interface_of_rrefs(self, found):
        for caller in found:
            assert caller["references"] == {
                "owner": ("ps", False, True), "sync": 1, "async": 2, "keyword": None,
                "function": [1, 2, 3], "state": [3, 2, 1], "here": ([], 7, False),
            }  # fmt: skip


def test_one_name_is_one_object_and_no_name_is_a_new_one():
    with alone():
        one, same = (remote("ps", list, name="a") for _ in range(2))
        other = remote("ps", list, name="b")
        assert one.local_value() is same.local_value() is not other.local_value()
        assert remote("ps", list).local_value() is not one.local_value()
    with alone():  # another run
        assert remote("ps", list, name="a").local_value() is not one.local_value()


def test_one_process_has_no_gradients_of_two_trainers():
    """Each context would have the sum of both, so both together twice that."""
    weight = torch.nn.Parameter(torch.ones(1))
    with alone(), gradients.context() as one, gradients.context() as other:
        for context, factor in ((one, 1), (other, 10)):
            gradients.backward(context, factor * weight.sum())
        with pytest.raises(RuntimeError, match="let one trainer have the whole batch"):
            gradients.take_sum([one, other], [weight])


class TestRef:
    def test_keeps_its_object_and_once_it_is_sent_so_does_the_worker(self):
        ref = reference(one := roles.Counter())
        assert ref == reference(one) != reference(roles.Counter())
        alive, sent = weakref.ref(one), pickle.dumps(ref)
        del ref, one
        again = pickle.loads(sent)
        assert again.local_value() is alive() is not None
        assert again == reference(alive())
        unsent = weakref.ref(reference(roles.Counter()).local_value())
        assert unsent() is None

    def test_is_of_no_use_elsewhere(self):
        with pytest.raises(RuntimeError, match="on elsewhere"):
            Ref("elsewhere", 0).local_value()

    def test_of_a_name_that_two_threads_ask_for_at_once_are_the_same(self, monkeypatch):
        def make():
            second.come()
            return roles.Counter()

        second = Second(lambda: references._make("counter", make))
        monkeypatch.setattr(references, "_making", second)
        monkeypatch.setattr(network.current(), "named", {})
        first = references._make("counter", make)
        assert first.local_value() is second.done().local_value()

    def test_calls_in_this_process_run_beside_the_caller_if_it_does_not_wait(self):
        event = threading.Event()
        ref = reference(event)
        future = ref.rpc_async().wait(60)
        ref.rpc_sync().set()  # too late if the call had blocked
        assert future.wait() is True and ref.local_value() is event

    def test_an_answer_that_comes_later_is_waited_for(self):
        ref = reference(roles.Counter())
        assert ref.rpc_sync().add_later(1) == 2
        assert ref.rpc_async().add_later(1).wait() == 2
        with pytest.raises(KeyError, match="no such thing"):
            ref.rpc_async().fail("KeyError").wait()


class TestRendezvous:
    def test_nobody_is_answered_before_the_last_has_come(self):
        met = Rendezvous(all_that_was_brought, range(3))
        last, first = met.enter(2, "c"), met.enter(0, "a")
        assert not last.done() and not first.done()
        middle = met.enter(1, "b")
        assert [f.wait() for f in (first, middle, last)] == [["a", "b", "c"]] * 3

    def test_who_leaves_is_not_waited_for(self):
        met = Rendezvous(all_that_was_brought)
        met.expect((0, 1))
        one = met.enter(0, "a")
        met.leave(1)
        assert one.wait() == ["a"]
        assert met.enter(0, "again").wait() == ["again"]
        with pytest.raises(RuntimeError, match="nobody waits for 1 here"):
            met.enter(1)

    def test_who_has_come_and_leaves_keeps_nobody_waiting_and_is_not_answered(self):
        meeting = Rendezvous(all_that_was_brought, (1, 2))
        leaves = meeting.enter(1, "a")
        meeting.leave(1)
        stays = meeting.enter(2, "b")
        assert stays.done() and stays.value() == ["b"] and not leaves.done()

    @pytest.mark.parametrize("answers", [{1: "one"}, None], ids=["one", "none"])
    def test_all_are_told_if_some_have_no_answer(self, answers):
        met = Rendezvous(lambda brought: answers, (1, 2))
        for future in [met.enter(1), met.enter(2)]:
            with pytest.raises((KeyError, TypeError)):
                future.wait()
