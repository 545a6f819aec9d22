"""References, gradients across workers, and rendezvous: all equal one process."""

import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import roles
import seam_roles
import torch
import torch.distributed.rpc as rpc
from locks import Second
from running import end_server

from cdopt_tutorial.calls import alone, gradients, reference, references, remote
from cdopt_tutorial.calls.references import Ref
from cdopt_tutorial.calls.rendezvous import Rendezvous, all_that_was_brought
from cdopt_tutorial.run import Role, launch, serve

GUESTS = range(2)


def by_hand(scale):
    """The same loss and gradients by plain autograd, without references or calls."""
    part = seam_roles.Part(3)
    own = torch.nn.Parameter(torch.full((2,), scale, dtype=torch.float64))
    vectors = torch.tanh(part.table(torch.tensor([0, 1, 1])))
    weight, bias = part.layer.parameters()
    loss = (own * 2 * part.layer(vectors)).square().sum() + vectors.sum()
    loss = loss + weight.sum() * bias.prod()
    loss.backward()
    found = {n: p.grad for n, p in part.named_parameters() if p.grad is not None}
    return loss.item(), {"own": own.grad, **found}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-13)
        assert gradient.abs().max() > 0


@pytest.fixture(scope="module", params=[None, gradients.cut_always])
def found(request):
    """What two guests found, who did everything at once on one server."""
    each = [(guest, len(GUESTS)) for guest in GUESTS]
    system = {f"t{i}": Role(seam_roles.take_part, each[i]) for i in (1, 0)}
    system |= {"ps": Role(serve, num_threads=3)}
    results = launch(system, rpc_threads=8, attach=request.param)
    return [results[f"t{guest}"] for guest in GUESTS]


class TestWorkers:
    def test_a_gradient_crosses_as_if_there_were_no_wire(self, found):
        for guest in GUESTS:  # of one part at once, and kept apart
            loss, expected = by_hand(1.0 + guest)
            for step in found[guest]["steps"]:  # without traces in the next
                assert step[0] == pytest.approx(loss, rel=1e-12)
                assert_same(step[1], expected)

    def test_gradients_are_there_until_they_are_forgotten(self, found):
        for guest in GUESTS:
            expected = by_hand(1.0 + guest)[1]
            expected.pop("own")
            for left in found[guest]["left"]:
                assert_same(left, expected)

    def test_calls_and_their_ways_back_take_the_threads_of_the_role(self, found):
        # Even the first in its thread, before any parallel operator.
        assert [each["threads"] for each in found] == [[3] * 20] * 2

    def test_workers_meet_round_by_round(self, found):
        rounds = [[(guest, number) for guest in GUESTS] for number in range(20)]
        for each in found:
            met, raised = each["met"]
            assert met == rounds
            assert raised == "ps"  # and was not the result

    def test_references_have_the_interface_of_rrefs(self, found):
        for each in found:
            seen = each["references"]
            assert seen == {
                "owner": ("ps", False, True), "sync": 1, "async": 2, "keyword": None,
                "function": [1, 2, 3], "state": [3, 2, 1], "here": ([], 7, False),
            }  # fmt: skip


def test_in_one_process_autograd_does_it():
    loss, found = seam_roles.step(remote("ps", seam_roles.Part, 3))
    expected = by_hand(1.0)
    assert loss == pytest.approx(expected[0], rel=1e-12)
    assert_same(found, expected[1])


def test_one_name_is_one_object_and_no_name_is_a_new_one():
    with alone():
        one, same = (remote("ps", list, name="a") for _ in range(2))
        other = remote("ps", list, name="b")
        assert one.local_value() is same.local_value() is not other.local_value()
        assert remote("ps", list).local_value() is not one.local_value()
    with alone():  # another run
        assert remote("ps", list, name="a").local_value() is not one.local_value()


class TestRef:
    def test_keeps_its_object_and_once_it_is_sent_so_does_the_worker(self):
        ref = reference(one := roles.Counter())
        assert ref == reference(one) != reference(roles.Counter())
        alive, sent = weakref.ref(one), pickle.dumps(ref)
        del ref, one
        assert pickle.loads(sent).local_value() is alive() is not None
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
        monkeypatch.setattr(references, "_named", {})
        first = references._make("counter", make)
        assert first.local_value() is second.done().local_value()


def test_a_call_in_this_process_is_a_plain_one_or_runs_beside_the_caller():
    event = threading.Event()
    ref = reference(event)
    future = ref.rpc_async().wait(60)
    ref.rpc_sync().set()  # too late if the call had blocked
    assert future.wait() is True and ref.local_value() is event


def test_an_answer_that_comes_later_is_waited_for():
    ref = reference(roles.Counter())
    assert ref.rpc_sync().add_later(1) == 2
    assert ref.rpc_async().add_later(1).wait() == 2
    with pytest.raises(KeyError, match="no such thing"):
        ref.rpc_async().fail("KeyError").wait()


def test_calls_are_answered_with_one_thread_each(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    end_server()  # the next one starts without it
    asking = rpc.rpc_sync, ("server", roles.threads_of_a_product)
    results = launch({"asking": Role(*asking), "server": Role(serve)})
    assert results["asking"] == 0


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

    def test_many_threads_meet_many_times(self):
        met = Rendezvous(all_that_was_brought, range(4))

        def guest(number):
            return [met.enter(number, (number, i)).wait() for i in range(200)]

        with ThreadPoolExecutor(4) as threads:
            found = [*threads.map(guest, range(4))]
        assert found == [[[(guest, i) for guest in range(4)] for i in range(200)]] * 4
