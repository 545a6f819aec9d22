"""References beside RRef: the local one, and the one that is only a name."""

import pickle
import threading

import pytest
import roles
import torch.distributed.rpc as rpc
from locks import Second

from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.launcher import forking
from cdopt_tutorial.engines.seam import reference
from cdopt_tutorial.engines.seam.reference import LocalRef, Ref


class TestLocalRef:
    def test_a_synchronous_call_is_a_plain_one(self):
        ref = LocalRef(roles.Counter())
        assert ref.rpc_sync().add(1) == 2
        assert ref.local_value().count == 1

    def test_an_asynchronous_call_runs_beside_the_caller(self):
        event = threading.Event()
        future = LocalRef(event).rpc_async().wait(60)
        event.set()  # would come too late if the call had been made at once
        assert future.wait() is True

    def test_an_answer_that_comes_later_is_waited_for(self):
        ref = LocalRef(roles.Counter())
        assert ref.rpc_sync().add_later(1) == 2
        assert ref.rpc_async().add_later(1).wait() == 2

    def test_an_error_comes_back_by_the_future(self):
        future = LocalRef(roles.Counter()).rpc_async().fail("KeyError")
        with pytest.raises(Exception, match="no such thing"):
            future.wait()


def test_calls_are_answered_with_one_thread_each(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")  # that of the tests
    forking.end_server()  # the next one begins without it
    asking = rpc.rpc_sync, ("server", roles.threads_of_a_product)
    results = launch({"asking": Role(*asking), "server": Role(serve)})
    assert results["asking"] == 0


class TestRef:
    def test_is_the_same_for_the_same_object_only(self):
        one, two = roles.Counter(), roles.Counter()
        assert Ref.to(one) == Ref.to(one) != Ref.to(two)

    def test_of_two_threads_at_once_are_of_their_own_objects(self, monkeypatch):
        one, two = roles.Counter(), roles.Counter()
        second = Second(lambda: Ref.to(two))

        class Objects(list):
            def append(self, value):
                second.come()
                super().append(value)

        monkeypatch.setattr(reference, "_making", second)
        monkeypatch.setattr(reference, "_objects", Objects())
        first = Ref.to(one)
        assert second.done() != first
        assert (first.local_value(), second.done().local_value()) == (one, two)

    def test_of_a_name_that_two_threads_ask_for_at_once_are_the_same(self, monkeypatch):
        def make():
            second.come()
            return roles.Counter()

        second = Second(lambda: Ref.named("counter", make))
        monkeypatch.setattr(reference, "_making", second)
        monkeypatch.setattr(reference, "_named", {})
        assert Ref.named("counter", make) == second.done()

    def test_works_without_rpc(self):
        counter = pickle.loads(pickle.dumps(Ref.to(roles.Counter()))).rpc_sync()
        assert [counter.add(10), counter.add(10)] == [11, 12]
        assert counter.add_later(1) == 2

    def test_calls_the_object_where_it_lives(self):
        results = launch(
            {"agent": Role(roles.use_reference, ("other",)), "other": Role(serve)}
        )["agent"]
        assert results == ["other", 11, 12, 6, "no such thing"]
