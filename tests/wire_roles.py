"""Roles for the tests of the wire; they must be importable by workers."""

import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from cdopt_tutorial.engines import meeting
from cdopt_tutorial.engines.probes import wire


def swallow(tensor):
    """Takes much, answers little."""


def give_late(num_bytes):
    time.sleep(0.5)
    return torch.zeros(num_bytes, dtype=torch.uint8)


def double(tensor):
    return 2 * tensor


def send(other, num_bytes):
    rpc.rpc_sync(other, swallow, args=(torch.zeros(num_bytes, dtype=torch.uint8),))


def send_all(other, once, back, added, late):
    """By a call, a gradient, a process group, and an answer that comes after all."""
    send(other, once)
    send_forth_and_back(other, back)
    sum_up(0, added)
    rpc.rpc_async(other, give_late, args=(late,))


def send_late(other, num_bytes):
    """When the role of the other one has returned long since."""
    time.sleep(2)
    send(other, num_bytes)


def count_late():
    """Serve, and count when the others have counted long since."""
    count = wire.received_bytes

    def late():
        time.sleep(0.5)
        return count()

    wire.received_bytes = late


def send_forth_and_back(other, num_bytes):
    """Through another worker and, with the gradient, once more."""
    values = torch.zeros(num_bytes // 4, requires_grad=True)
    with dist_autograd.context() as context:
        doubled = rpc.rpc_sync(other, double, args=(values,))
        # The gradient of a plain sum is one number, and travels as such.
        dist_autograd.backward(context, [doubled.square().sum()])


def sum_up(rank, num_bytes):
    """Add a tensor over two workers by gloo."""
    dist.init_process_group("gloo", meeting("all"), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(num_bytes // 4))
