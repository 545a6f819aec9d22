"""How this process reaches the other workers: by torch RPC, unless it joins another."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch.distributed.rpc as rpc
from torch.distributed.rpc.internal import RemoteException
from torch.futures import Future


class Network(Protocol):
    """Carries calls between workers; its own methods, in the RPC group of ``launch``.

    A call is that of ``rpc.rpc_sync``: a function, its positional and its keyword
    arguments, and a timeout in seconds, 0 for none. All but the function are optional.
    """

    def own_name(self) -> str:
        """This worker's name; empty where there are no others."""
        joined = rpc.api._is_current_rpc_agent_set()
        return rpc.get_worker_info().name if joined else ""

    def call(self, worker: str, function: Callable, args: tuple = (), *more: Any):
        """Run a function on a worker; if it returns a future, wait for that there.

        What the function or the future raises there is raised here.
        """
        return rpc.rpc_sync(worker, _answer, (function, *args), *more)

    def call_async(self, worker: str, function: Callable, args: tuple = (), *more: Any):
        """The same, but return a future of torch at once."""
        return rpc.rpc_async(worker, _answer, (function, *args), *more)


@rpc.functions.async_execution
def _answer(function: Callable, /, *args: Any, **kwargs: Any) -> Future:
    """Runs on the worker that is called."""
    result = function(*args, **kwargs)
    answer: Future = Future()
    if isinstance(result, Future):
        result.add_done_callback(partial(_finish, answer))
    else:
        answer.set_result(result)
    return answer


def _finish(answer: Future, done: Future) -> None:
    try:
        answer.set_result(done.value())
    except Exception as error:
        # Torch would return the exception of a future as if it were a result.
        said = f"On {rpc.get_worker_info()}:\n{error!r}\n{traceback.format_exc()}"
        answer.set_result(RemoteException(said, type(error)))


class _RPCGroup(Network):
    """The RPC group that a worker of ``launch`` has joined."""


_current: Network = _RPCGroup()


def current() -> Network:
    """The network that this process is in."""
    return _current


def enter(network: Network) -> None:
    """Reach the others by another network from now on."""
    global _current
    _current = network
