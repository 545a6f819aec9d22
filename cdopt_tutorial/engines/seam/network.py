"""How this process reaches the other workers: by torch RPC, unless it joins another."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.distributed.rpc as rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future


class Network(Protocol):
    """What carries calls between workers; time-outs in seconds, 0 for none."""

    def own_name(self) -> str:
        """This worker's name; empty where there are no others."""

    def call(
        self,
        worker: str,
        function: Callable,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Any:
        """Run a function on a worker; if it answers by a future, wait for that there.

        That is only for functions with the mark of ``rpc.functions.async_execution``.
        """

    def call_async(self, worker: str, function: Callable, *call: Any) -> Future:
        """The same, with the same arguments, for which nobody waits here."""


class TorchNetwork:
    """The RPC group that a worker of ``launch`` has joined."""

    def own_name(self) -> str:
        joined = rpc.api._is_current_rpc_agent_set()
        return rpc.get_worker_info().name if joined else ""

    def call(self, *args: Any) -> Any:
        return rpc.rpc_sync(*args)

    def call_async(self, *args: Any) -> Future:
        return rpc.rpc_async(*args)


_current: Network = TorchNetwork()


def current() -> Network:
    """The one that this process is in."""
    return _current


def enter(network: Network) -> None:
    """Reach the others by this one from now on."""
    global _current
    _current = network
