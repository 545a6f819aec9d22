"""How many bytes a run sends, read from the workers' own sockets.

Linux counts for each TCP connection what it has carried (``TCP_INFO``, since 4.1), so
what other programs send meanwhile is not in it. Everything between the workers is: the
calls, the messages that torch's C++ core sends by itself, such as the backward pass of
distributed autograd, what frames them, and the collectives of a gloo process group.

Counted is what was *received*. A byte counts as sent only once its receipt has been
confirmed, which TCP may put off; but a call that is answered has been received. Each
byte between two workers is received by one of them, so their sum counts it once.

Not seen are shared memory, so NCCL on one host either, what went to anybody who is not
a worker, and connections that were closed before the end, for instance of a process
group that a role destroyed. Without a wire nothing is read, and nobody waits.
"""

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.rpc import api

_DESCRIPTORS = "/proc/self/fd"
_BYTES_RECEIVED = struct.Struct("=128xQ")  # where it stands in the kernel's tcp_info


@dataclass
class Wire:
    """The bytes of one run; pass it to ``launch``, read it afterwards.

    Attributes:
        received: bytes that each worker's sockets have received, by its name.
    """

    received: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes that all workers together have sent each other."""
        return sum(self.received.values())


def bytes_per_step(run: Callable[[int, Wire], Any], steps: int) -> float:
    """Bytes that one step more sends, from a run of one step and a longer one.

    Called by the parent. What both runs send, at their start and their end, cancels.

    Args:
        run: called as ``run(num_steps, wire)``; launches a run of so many steps, on
            sockets, with this wire.
        steps: by how many the second run is longer, at least 1.

    Raises:
        ValueError: there are no steps to compare.
        WorkerError: a run failed.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, but must be at least 1")
    short, long = Wire(), Wire()
    run(1, short)
    run(1 + steps, long)
    return (long.total - short.total) / steps


def count() -> int:
    """Bytes that this worker has received; called once its role has returned.

    All workers of the run must call it, and wait for each other, twice: no call is
    under way anywhere when they begin to count, and nobody begins to leave, which
    sends messages and closes connections, until all have counted. A worker whose role
    returned early answers calls meanwhile.
    """
    agent = api._get_current_rpc_agent()
    # Waits without a limit for the others' roles; what ``join`` waits on has one.
    api._wait_all_workers()
    agent.join()  # by the file of the rendezvous: this is not on any socket
    received = received_bytes()
    agent.join()
    return received


def received_bytes() -> int:
    """Bytes that the open TCP connections of this process have received so far."""
    total = 0
    for descriptor in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # closed since it was listed
            if os.readlink(f"{_DESCRIPTORS}/{descriptor}").startswith("socket:"):
                total += _received(int(descriptor))
    return total


def _received(descriptor: int) -> int:
    """Of one socket; 0 if it is not of TCP, or only listens."""
    end = socket.socket(fileno=descriptor)
    try:
        listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens or end.proto != socket.IPPROTO_TCP:
            return 0
        size = _BYTES_RECEIVED.size
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        return _BYTES_RECEIVED.unpack(info)[0]
    finally:
        end.detach()  # it is not ours to close
