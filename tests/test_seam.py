"""References, gradients that cross, and rendezvous: every way equals one process."""

import pickle
import threading

import pytest
import seam_roles
import torch

from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.one_process import OneProcess
from cdopt_tutorial.engines.seam.gradients import WAYS
from cdopt_tutorial.engines.seam.reference import LocalRef, Ref, is_reference
from cdopt_tutorial.engines.seam.rendezvous import Rendezvous, all_that_was_brought
from cdopt_tutorial.engines.torch_rpc import TorchRPC


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
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-13)
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_crosses_as_if_there_were_no_wire(way):
    roles = {"t": Role(seam_roles.train, (TorchRPC(way),)), "ps": Role(serve)}
    for step in launch(roles)["t"]:  # nothing is left of one step in the next
        assert_same(step, by_hand(1.0))


@pytest.mark.parametrize("way", WAYS)
def test_calls_and_their_ways_back_take_the_threads_of_the_role(way):
    # Also the first in its thread, before any operator that torch makes parallel.
    roles = {"t": Role(seam_roles.double, (TorchRPC(way), 20))}
    seen = launch(roles | {"ps": Role(serve, num_threads=3)}, rpc_threads=8)["t"]
    assert seen == [3] * 40


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_two_callers_at_once_are_kept_apart(way):
    roles = {f"t{i}": Role(seam_roles.train, (TorchRPC(way), 1.0 + i)) for i in (0, 1)}
    found = launch(roles | {"ps": Role(serve)})
    for number in (0, 1):
        for step in found[f"t{number}"]:
            assert_same(step, by_hand(1.0 + number))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_there_until_they_are_forgotten(way):
    roles = {"t": Role(seam_roles.interleaved, (TorchRPC(way),)), "ps": Role(serve)}
    before, again, after = launch(roles)["t"]
    expected = {n: g for n, g in by_hand(1.0)[1].items() if n != "own"}
    for found in (before, again, after):
        found.pop("own", None)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-13)


def test_in_one_process_autograd_does_it():
    engine = OneProcess()
    ref = engine.remote("ps", seam_roles.Part, 3)
    found = seam_roles.step(engine, ref)
    assert_same(found, by_hand(1.0))


def test_one_name_is_one_object_and_no_name_is_a_new_one():
    engine = OneProcess()
    one, same = (engine.remote("ps", list, name="a") for _ in range(2))
    other = engine.remote("ps", list, name="b")
    assert one.local_value() is same.local_value() is not other.local_value()
    assert engine.remote("ps", list).local_value() is not one.local_value()


def test_references_have_the_interface_of_rrefs():
    roles = {"t": Role(seam_roles.references, (TorchRPC(),)), "ps": Role(serve)}
    found = launch(roles)["t"]
    assert found["owner"] == ("ps", False, True)
    assert (found["sync"], found["async"], found["keyword"]) == (1, 2, None)
    assert (found["function"], found["state"]) == ([1, 2, 3], [3, 2, 1])
    assert found["here"] == ([], 7, False)
    assert is_reference(LocalRef(1)) and is_reference(Ref.to([]))
    assert not is_reference(1) and not is_reference(torch.nn.Linear(1, 1))
    owned = type("Owned", (), {"is_owner": Ref.is_owner, "owner_name": Ref.owner_name})
    assert not is_reference(owned())  # a part of the interface is none


def test_a_name_without_rpc_is_the_object_here():
    value = [1]
    ref = pickle.loads(pickle.dumps(Ref.to(value)))
    assert ref == Ref.to(value) != Ref.to([1])
    assert ref.rpc_sync().count(1) == ref.rpc_async().count(1).wait() == 1
    with pytest.raises(RuntimeError, match="on elsewhere"):
        Ref("elsewhere", 0).local_value()


def test_a_way_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="way is 'auto', but must be distributed or"):
        TorchRPC("auto")


def test_workers_meet_round_by_round():
    roles = {f"t{i}": Role(seam_roles.meet, (TorchRPC(), i, 3, 20)) for i in (2, 0, 1)}
    found = launch(roles | {"ps": Role(serve)})
    expected = [[(guest, number) for guest in range(3)] for number in range(20)]
    assert all(found[f"t{i}"] == expected for i in range(3))


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

    def test_an_error_reaches_all(self):
        met = Rendezvous(lambda brought: 1 / 0, (0, 1))
        for future in met.enter(0), met.enter(1):
            with pytest.raises(ZeroDivisionError):
                future.wait()

    def test_many_threads_meet_many_times(self):
        met, found = Rendezvous(all_that_was_brought, range(4)), {}

        def guest(number):
            found[number] = [met.enter(number, (number, i)).wait() for i in range(200)]

        threads = [threading.Thread(target=guest, args=(i,)) for i in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        expected = [[(guest, i) for guest in range(4)] for i in range(200)]
        assert all(found[number] == expected for number in range(4))
