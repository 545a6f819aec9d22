"""How many bytes a run sends, read from the workers' own sockets.

Linux counts what each TCP connection has carried (``TCP_INFO``, since 4.1). Not seen
are shared memory, so NCCL on one host either, and connections closed before the end.
"""

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from torch.distributed.rpc import api

_BYTES_RECEIVED = struct.Struct("=128xQ")  # where it stands in the kernel's tcp_info


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
    # All wait for each other twice: no call is under way anywhere when they begin to
    # count, and nobody leaves, which sends messages, until all have.
    agent = api._get_current_rpc_agent()
    api._wait_all_workers()  # for the others' roles, without a limit as ``join`` has
    agent.join()  # by the file of the rendezvous: this is not on any socket
    received = received_bytes()
    agent.join()
    return received


def received_bytes() -> int:
    """Bytes that the open TCP connections of this process have received so far."""
    size, total = _BYTES_RECEIVED.size, 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            continue
        with suppress(OSError):  # closed since it was listed
            end = socket.socket(fileno=connection.fd)
            try:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
                total += _BYTES_RECEIVED.unpack(info)[0]
            finally:
                end.detach()  # it is not ours to close
    return total
