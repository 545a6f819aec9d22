"""How many bytes a run sends, read from the workers' own sockets.

Linux counts what each TCP connection has carried (``TCP_INFO``, since 4.1). It misses
shared memory, and so NCCL on one host, and connections closed before the end.
"""

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from torch.distributed.rpc import api

_BYTES_RECEIVED = struct.Struct("=128xQ")  # its place in the kernel's tcp_info


@dataclass
class Wire:
    """The bytes of one run; pass it to ``launch``, read it afterwards."""

    received: dict[str, int] = field(default_factory=dict)  #: by worker

    @property
    def total(self) -> int:
        """Bytes that all workers together have sent each other."""
        return sum(self.received.values())


def count() -> int:
    """Bytes that this worker has received; called once its role has returned."""
    # All wait for each other twice: no call is under way when they begin to count, and
    # nobody leaves, which sends messages, before all have counted.
    agent = api._get_current_rpc_agent()
    api._wait_all_workers()  # for the others' roles; unlike ``join``, without a limit
    agent.join()  # through the rendezvous file, so over no socket
    received = received_bytes()
    agent.join()
    return received


def received_bytes() -> int:
    """Bytes that the open TCP connections of this process have received so far."""
    size, total = _BYTES_RECEIVED.size, 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            continue
        # It may have been closed since it was listed.
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as end:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
            total += _BYTES_RECEIVED.unpack(info)[0]
    return total
