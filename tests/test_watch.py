"""Which worker is late: among processes of this host, actors, hosts of torchrun."""

import math
import socket
import sys
import time
from concurrent.futures import Future
from contextlib import nullcontext
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdopt_tutorial.engines import Role, WorkerError, launch, passed
from cdopt_tutorial.engines.actors.actor import Actors, ActorWorker, WorkerPlan
from cdopt_tutorial.engines.actors.driver import Driver
from cdopt_tutorial.engines.launcher import pack, process
from cdopt_tutorial.engines.watch.errors import WorkerLost
from cdopt_tutorial.engines.watch.pace import LOST, Pace, Watched, find_late

HOSTS = {"agent": "host1", "observer0": "host1", "observer1": "host2"}


def late(silent, own="agent", patience=LOST):
    """The late one of workers on two hosts, by how long each has been silent."""
    now = time.monotonic()
    workers = [
        Watched(name, "running", None, HOSTS[name], now - each, patience)
        for name, each in zip(HOSTS, silent, strict=True)
    ]
    with mock.patch("time.monotonic", return_value=now):
        return find_late(workers, now, 60, own)


LONG = 2 * LOST
ELSEWHERE = "observer1", "on host2 has not been heard from for 15 s"


@pytest.mark.parametrize("last", [0.0, 1.0], ids=["at once", "last of it"])
def test_who_is_cut_off_names_who_is_elsewhere(last):
    # It does not hear from itself, and heard from the others last.
    assert late([LOST + 1, LONG, LONG - last]) == ELSEWHERE
    assert late([0, 0, LONG]) == late([0, 0, LONG], own="") == ELSEWHERE


def test_who_has_stopped_is_named_also_beside_who_asks():
    silent = "on host1 has not been heard from for 15 s"
    assert late([0, LONG, 0]) == ("observer0", silent)


def test_who_has_not_begun_yet_has_the_time_to_join():
    assert late([0, 0, LONG], patience=60) is None
    found = late([0, 0, LONG + 60], patience=60)
    assert found == ("observer1", "on host2 has not been heard from for 60 s")


@given(st.lists(st.floats(0, 0.9 * LOST), min_size=3, max_size=3))
def test_nobody_is_late_who_was_heard_of(silent):
    assert late(silent) is None


def test_who_has_not_even_started_is_named_before_who_joins():
    workers = [Watched("a", "joining"), Watched("b"), Watched("c", "running")]
    now = time.monotonic()
    assert find_late(workers, now, 60) is None
    missed = "missed the deadline of 60 s to join"
    assert find_late(workers, now - 61, 60) == ("b", missed)


def test_who_is_done_keeps_no_pace():
    behind = Pace(1, time.monotonic() - 1, 2.0, "")
    workers = [Watched("a", "running", Pace(2, math.inf, 2.0, "")), Watched("b")]
    workers[1].phase, workers[1].pace = "running", behind
    missed = "missed its deadline of 2 s for its part of a step"
    assert find_late(workers, 0, 60) == ("b", missed)
    workers[1].phase = "done"
    assert find_late(workers, 0, 60) is None


RUNNING = [("phase", "running", "here")]
DONE = [("result", b"its result")]
DIED = WorkerLost("agent", "died")


class Library(Actors):
    """In place of Ray: an actor that sends what a test says, or has died."""

    def __init__(self, *takes, pace=None):
        self._takes, self._pace = iter(takes), pace

    def ask(self, worker, method):
        future, answer = Future(), next(self._takes, ()) if method == "take" else None
        if answer is DIED:
            future.set_exception(answer)
        elif answer is not None:
            future.set_result((answer, self._pace))
        return future

    def wait(self, request, timeout):
        raise NotImplementedError("the driver waits for several")

    def future(self, request):
        return request

    def named(self, worker):
        return nullcontext()

    def run(self):
        return Driver(self, ["agent"], 60.0).run()


class TestDriver:
    @pytest.fixture(autouse=True)
    def reports(self, monkeypatch):
        found = []
        monkeypatch.setattr(process, "report", found.append)
        return found

    def test_what_is_on_its_way_when_all_are_done_comes_to_the_caller(self, reports):
        library = Library(RUNNING, DONE, [("report", 1)], [("report", 2)])
        assert library.run() == {"agent": b"its result"}
        assert reports == [("agent", "report", 1), ("agent", "report", 2)]

    def test_who_dies_is_named_also_once_its_role_is_over(self):
        for takes in [RUNNING], [RUNNING, DONE]:
            with pytest.raises(WorkerError, match="^agent died"):
                Library(*takes, DIED).run()

    def test_an_actor_is_late_once_its_seconds_from_now_are_over(self):
        pace = Pace(1, 60.0, 5.0, "")
        assert Library(RUNNING, DONE, pace=pace).run() == {"agent": b"its result"}
        with pytest.raises(WorkerError, match="^agent missed its deadline of 5 s"):
            Library(RUNNING, DONE, pace=pace._replace(until=-1.0)).run()


class Here(ActorWorker):
    """A worker without a library of actors."""

    def _enter(self, plan):
        return Library(), process.LOOPBACK


def take_on_the_way(settings, packed):
    """The messages of an actor, and its pace."""
    worker = Here(WorkerPlan(settings, "actor", packed, sys.path, 60.0))
    passed(5.0, "server")
    return worker.take()


def test_an_actors_deadline_is_in_seconds_from_now():
    # By another host's clock it might never come, or have passed.
    packed, modules = pack.pack({"actor": (None, Role(time.sleep, (0,)))})
    settings = process.Settings(1, "", "", "lo", 60.0, 4, False, modules, False, False)
    role = Role(take_on_the_way, (settings, packed["actor"]))
    messages, found = launch({"a": role})["a"]
    assert messages == [("phase", "running", socket.gethostname())]
    assert (found.places, found.seconds, found.waits_for) == (1, 5.0, "server")
    assert found.until <= 5.0
