"""The wire: the bytes of a run's own sockets, all of them and no others."""

import socket
import time

import pytest
import roles
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from cdopt_tutorial.probes import wire as probe
from cdopt_tutorial.probes.wire import received_bytes
from cdopt_tutorial.run import Role, Wire, WorkerError, launch, process_group, serve

SERVING = Role(serve)
# Bytes sent by a call, a gradient, a process group, and a late result; all their sums
# differ.
ONCE, BACK, ADDED, LATE = 1_000_000, 2_000_000, 4_000_000, 8_000_000
MESSAGES = 20_000  # at most so many bytes more, for joining, calling, leaving


# What workers do.


def swallow(tensor):
    """Takes much, returns nothing."""


def give_late(num_bytes):
    time.sleep(0.5)
    return torch.zeros(num_bytes, dtype=torch.uint8)


def double(tensor):
    return 2 * tensor


def send(other, num_bytes):
    rpc.rpc_sync(other, swallow, args=(torch.zeros(num_bytes, dtype=torch.uint8),))


def send_all(other, once, back, added, late):
    """By a call, a gradient, a process group, and a result that comes last."""
    send(other, once)
    send_forth_and_back(other, back)
    sum_up(0, added)
    rpc.rpc_async(other, give_late, args=(late,))


def send_late(other, num_bytes):
    """Long after the other role has returned."""
    time.sleep(9)
    send(other, num_bytes)


def count_late():
    """Serve, and count long after the others."""
    count = probe.received_bytes

    def late():
        time.sleep(0.5)
        return count()

    probe.received_bytes = late


def send_forth_and_back(other, num_bytes):
    """Send values to another worker and back, and their gradient, too."""
    values = torch.zeros(num_bytes // 4, requires_grad=True)
    with dist_autograd.context() as context:
        doubled = rpc.rpc_sync(other, double, args=(values,))
        # The gradient of a plain sum would travel as a single number.
        dist_autograd.backward(context, [doubled.square().sum()])


def sum_up(rank, num_bytes):
    """Add a tensor over two workers by gloo."""
    process_group.join(rank, 2, gpus=())
    dist.all_reduce(torch.ones(num_bytes // 4))


def count(first, second=SERVING, **options):
    """The wire of two workers."""
    wire = Wire()
    launch({"first": first, "second": second}, wire=wire, **options)
    return wire


def test_what_has_come_is_counted_even_unread():
    before = received_bytes()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as left,
        server.accept()[0] as right,
    ):
        left.sendall(bytes(1000))
        right.recv(1000, socket.MSG_WAITALL)
        left.sendall(bytes(500))
        right.recv(500, socket.MSG_WAITALL | socket.MSG_PEEK)
        assert received_bytes() - before == 1500


class TestRun:
    def test_all_is_counted_where_it_arrives(self):
        sending = Role(send_all, ("second", ONCE, BACK, ADDED, LATE))
        wire = count(sending, Role(sum_up, (1, ADDED)))
        assert list(wire.received) == ["first", "second"]
        # A gradient makes the way of the values in reverse. Of an all-reduce by a ring,
        # each sends half of the tensor, and then half of the result.
        expected = {"first": 2 * BACK + ADDED + LATE, "second": ONCE + 2 * BACK + ADDED}
        for name, least in expected.items():
            assert least < wire.received[name] < least + MESSAGES
        assert wire.total == sum(wire.received.values())

    def test_a_role_may_outlive_the_others_and_who_counts_late_counts_no_more(self):
        # Longer than a call may take: workers that are done wait without a limit.
        soon = count(SERVING, Role(send_late, ("first", ONCE)), rpc_timeout=8)
        assert ONCE < soon.received["first"] < ONCE + MESSAGES
        # The second one sends messages as it leaves, while the first may still count.
        after = count(Role(count_late), Role(send, ("first", ONCE)))
        assert after.total == pytest.approx(soon.total, abs=50)

    @pytest.mark.usefixtures("no_process_starts")
    def test_polling_is_refused(self):
        with pytest.raises(ValueError, match="polling is True, but must be False"):
            launch({"first": SERVING}, polling=True, wire=Wire())

    def test_a_worker_that_fails_is_named(self):
        # By then the other one waits for all to have counted.
        with pytest.raises(WorkerError, match="first raised ArithmeticError"):
            count(Role(roles.raise_error))
