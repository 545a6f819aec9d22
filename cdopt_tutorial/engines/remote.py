"""Calls on objects elsewhere, and two references beside ``RRef``.

One stands in for an RRef where all is in one process, one is for many small calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed.rpc as rpc
from torch import nn
from torch.futures import Future

from cdopt_tutorial.engines.reference import LocalRef


def call_method(method: Callable, rref, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the object that this worker owns; runs on the owner."""
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method: Callable, rref, *args: Any, **kwargs: Any) -> Any:
    """Call a method where its object lives, and wait for the result.

    Inside a context of distributed autograd, tensors that go and come stay part of
    the graph.

    Args:
        method: a function of the object, for instance ``nn.Embedding.forward``.
        rref: RRef or LocalRef to the object.
        args: of the method.
        kwargs: of the method.
    """
    if isinstance(rref, LocalRef):
        return call_method(method, rref, *args, **kwargs)
    return rpc.rpc_sync(
        rref.owner(), call_method, args=(method, rref, *args), kwargs=kwargs
    )


def parameter_rrefs(module: nn.Module) -> dict[str, rpc.RRef]:
    """An RRef to each parameter of a module of this worker; runs on the owner."""
    return {name: rpc.RRef(value) for name, value in module.named_parameters()}


@dataclass(frozen=True)
class Handle:
    """Names an object on a worker; a call through it costs half of one by an RRef.

    An RRef counts its users, so a copy of it goes along with every call, to be
    registered and forgotten again. A handle is only a name: it counts nothing, and
    the object stays until its worker ends. It pickles, and works without RPC too.

    Attributes:
        worker: name of the worker that has the object; empty without RPC.
        number: of the object on that worker.
    """

    worker: str
    number: int

    @staticmethod
    def to(value: Any) -> "Handle":
        """The handle of an object of this process; always the same one."""
        numbers = [i for i, shared in enumerate(_shared) if shared is value]
        if not numbers:
            numbers.append(len(_shared))
            _shared.append(value)
        return Handle(_own_name(), numbers[0])

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object where it lives, and wait for the result."""
        if self.worker == _own_name():
            return _call(getattr(_shared[self.number], method), *args)
        return rpc.rpc_sync(self.worker, call_shared, args=(self.number, method, *args))


def _own_name() -> str:
    """This worker's name; empty where there is no RPC."""
    joined = rpc.api._is_current_rpc_agent_set()
    return rpc.get_worker_info().name if joined else ""


_shared: list[Any] = []  # the objects of this process that have handles


@rpc.functions.async_execution
def call_shared(number: int, method: str, *args: Any) -> Future:
    """Runs where a handle's object lives; methods may answer later, by a future."""
    result = getattr(_shared[number], method)(*args)
    if isinstance(result, Future):
        return result
    future: Future = Future()
    future.set_result(result)
    return future


def _call(method: Callable, *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    # A method marked with async_execution answers with a future of its result.
    return result.wait() if isinstance(result, Future) else result
