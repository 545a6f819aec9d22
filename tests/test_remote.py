"""References that only name an object, in one process and in several."""

import pickle
import threading
import weakref

import pytest
import roles
import torch.distributed.rpc as rpc
from locks import Second

from cdopt_tutorial.calls import references
from cdopt_tutorial.calls.references import Ref, reference
from cdopt_tutorial.run import Role, forking, launch, serve


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
    forking.end_server()  # the next one starts without it
    asking = rpc.rpc_sync, ("server", roles.threads_of_a_product)
    results = launch({"asking": Role(*asking), "server": Role(serve)})
    assert results["asking"] == 0


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

    def test_calls_the_object_where_it_lives(self):
        results = launch(
            {"agent": Role(roles.use_reference, ("other",)), "other": Role(serve)}
        )["agent"]
        assert results == ["other", 11, 12, 6, "no such thing"]
