"""The wire: the bytes of a run's own sockets, all of them and no others."""

import socket
import threading
from contextlib import contextmanager

import pytest
import roles
import wire_roles

from cdopt_tutorial.engines import (
    Role,
    Wire,
    WorkerError,
    bytes_per_step,
    launch,
    serve,
)
from cdopt_tutorial.engines.probes.wire import received_bytes

SERVING = Role(serve)
SIZE = 4_000_000  # bytes of what is sent, beside which messages weigh little
MESSAGES = 10_000  # bytes around it, of one worker: joining, calling, leaving


def count(first, second=SERVING, **options):
    """The wire of two workers."""
    wire = Wire()
    roles_ = {"first": first, "second": second}
    launch(roles_, wire=wire, **options)
    return wire


@contextmanager
def connection():
    """Two connected TCP sockets of this process, and the one that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as left:
            right, _ = server.accept()
            with right:
                yield left, right


@contextmanager
def busy_loopback():
    """Traffic of a process that is no worker; gives a function that counts it."""
    ended = threading.Event()

    def chat():
        while not ended.wait(0.002):
            left.sendall(bytes(20_000))
            right.recv(20_000, socket.MSG_WAITALL)

    with connection() as (left, right):
        thread = threading.Thread(target=chat)
        thread.start()
        try:
            yield received_bytes
        finally:
            ended.set()
            thread.join()


class TestSockets:
    def test_what_has_come_is_counted_even_unread(self):
        before = received_bytes()
        with connection() as (left, right):
            left.sendall(bytes(1000))
            right.recv(1000, socket.MSG_WAITALL)
            left.sendall(bytes(500))
            right.recv(500, socket.MSG_WAITALL | socket.MSG_PEEK)
            assert received_bytes() - before == 1500

    def test_those_that_are_not_of_tcp_are_not(self):
        before = received_bytes()
        left, right = socket.socketpair()
        with left, right:
            left.sendall(bytes(1000))
            assert received_bytes() == before

    def test_counting_closes_none(self):
        with connection() as (left, right):
            received_bytes()
            left.sendall(b"open")
            assert right.recv(4, socket.MSG_WAITALL) == b"open"


class TestRun:
    def test_a_call_is_counted_where_it_arrives(self):
        wire = count(Role(wire_roles.send, ("second", SIZE)))
        assert list(wire.received) == ["first", "second"]
        assert SIZE < wire.received["second"] < SIZE + MESSAGES
        assert 0 < wire.received["first"] < MESSAGES
        assert wire.total == sum(wire.received.values())

    def test_an_answer_that_comes_after_the_role_is_counted(self):
        wire = count(Role(wire_roles.ask_and_leave, ("second", SIZE)))
        assert SIZE < wire.received["first"] < SIZE + MESSAGES

    def test_a_role_may_outlive_the_others(self):
        # Longer than a call may take: those who are done wait without a limit.
        late = Role(wire_roles.send_late, ("first", SIZE))
        wire = count(SERVING, late, rpc_timeout=1)
        assert SIZE < wire.received["first"] < SIZE + MESSAGES

    def test_who_counts_late_counts_no_more(self):
        # To leave, the second one tells the first one, who may still be counting.
        late = count(Role(wire_roles.count_late))
        assert late.total == pytest.approx(count(SERVING).total, abs=50)

    def test_the_backward_pass_is_counted(self):
        wire = count(Role(wire_roles.send_forth_and_back, ("second", SIZE)))
        for received in wire.received.values():
            assert 2 * SIZE < received < 2 * SIZE + MESSAGES

    def test_a_process_group_is_counted(self):
        wire = count(*(Role(wire_roles.sum_up, (rank, SIZE)) for rank in range(2)))
        for received in wire.received.values():
            # By the ring: half the sums go round, and then half the results.
            assert SIZE < received < SIZE + MESSAGES

    def test_other_programs_are_not_counted(self):
        role = Role(wire_roles.send, ("second", 1000))
        alone = count(role)
        with busy_loopback() as others:
            before = others()
            beside = count(role)
            assert others() - before > 20 * alone.total
        assert beside.total == pytest.approx(alone.total, rel=0.05)

    @pytest.mark.usefixtures("no_process_starts")
    def test_polling_is_refused(self):
        with pytest.raises(ValueError, match="polling is True, but must be False"):
            launch({"first": SERVING}, polling=True, wire=Wire())

    def test_a_worker_that_fails_is_named(self):
        # The other one waits by then for all to have counted.
        with pytest.raises(WorkerError, match="first raised ArithmeticError"):
            count(Role(roles.raise_error))


class TestBytesPerStep:
    def test_what_both_runs_send_cancels(self):
        def run(steps, wire):
            wire.received = {"first": 700 + 30 * steps, "second": 20 * steps}

        assert bytes_per_step(run, 4) == 50

    def test_of_real_runs(self):
        def run(steps, wire):
            role = Role(wire_roles.send, ("second", 100_000 * steps))
            launch({"first": role, "second": SERVING}, wire=wire)

        assert bytes_per_step(run, 2) == pytest.approx(100_000, rel=0.01)

    def test_refuses_to_compare_a_run_with_itself(self):
        with pytest.raises(ValueError, match="steps is 0, but must be at least 1"):
            bytes_per_step(lambda *_: None, 0)
