"""References to objects, on this worker or on another: the seam of all systems.

A reference is what has the interface of torch's ``RRef``: ``rpc_sync()`` and
``rpc_async()``, through which its object's methods are called, ``local_value()``,
``is_owner()`` and ``owner_name()``. ``RRef`` itself is one. Here are two more: one for
an object of this process, and one that is only a name, and so costs half as much.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed.rpc as rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

INTERFACE = ("rpc_sync", "rpc_async", "local_value", "is_owner", "owner_name")

Reference = Any
"""What has this interface, whatever engine it is of."""


def is_reference(value: Any) -> bool:
    """Whether something has the interface of a reference."""
    return all(hasattr(type(value), name) for name in INTERFACE)


def apply(reference: Reference, function: Callable, *args: Any) -> Any:
    """Run a function of an object on its owner, which must be able to import it."""
    if reference.is_owner():
        return _answer(function, reference.local_value(), *args)
    if isinstance(reference, Ref):
        return rpc.rpc_sync(
            reference.worker, serve_call, args=(reference.number, function, *args)
        )
    return rpc.rpc_sync(reference.owner(), _apply, args=(function, reference, *args))


class LocalRef:
    """A reference to an object of this process: the engine of one process.

    A synchronous call is a plain call; an asynchronous one runs in a thread of its
    own, as it would on another worker.
    """

    def __init__(self, value: Any):
        self._value = value

    def local_value(self) -> Any:
        return self._value

    def is_owner(self) -> bool:
        return True

    def owner_name(self) -> str:
        return ""  # there are no workers

    def rpc_sync(self, timeout: float = 0) -> "_Proxy":
        return _Proxy(lambda name: partial(_answer, getattr(self._value, name)))

    def rpc_async(self, timeout: float = 0) -> "_Proxy":
        return _Proxy(lambda name: partial(_in_thread, getattr(self._value, name)))


@dataclass(frozen=True)
class Ref:
    """Names an object on a worker; a call through it costs half of one by an RRef.

    An RRef counts its users, so whoever is handed one must be confirmed by the owner.
    A name counts nothing: it pickles, and the object stays until its worker ends.
    Methods may answer later, by a future, and be called while they call.
    """

    worker: str  #: name of the worker that has the object; empty without RPC
    number: int  #: of the object on that worker

    @staticmethod
    def to(value: Any) -> "Ref":
        """The reference to an object of this process; always the same one."""
        with _making:
            return Ref._to(value)

    @staticmethod
    def named(name: str, make: Callable, *args: Any) -> "Ref":
        """The same to the object of a name; whoever asks first has it made."""
        with _making:
            if name not in _named:
                _named[name] = make(*args)
            return Ref._to(_named[name])

    @staticmethod
    def _to(value: Any) -> "Ref":
        numbers = (i for i, known in enumerate(_objects) if known is value)
        number = next(numbers, len(_objects))
        if number == len(_objects):
            _objects.append(value)
        return Ref(own_name(), number)

    def local_value(self) -> Any:
        if not self.is_owner():
            raise RuntimeError(f"the object is on {self.worker}, not on {own_name()}")
        return _objects[self.number]

    def is_owner(self) -> bool:
        return self.worker == own_name()

    def owner_name(self) -> str:
        return self.worker

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> "_Proxy":
        if self.is_owner():
            return LocalRef(self.local_value()).rpc_sync()
        return _Proxy(lambda name: partial(self._send, rpc.rpc_sync, timeout, name))

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> "_Proxy":
        if self.is_owner():
            return LocalRef(self.local_value()).rpc_async()
        return _Proxy(lambda name: partial(self._send, rpc.rpc_async, timeout, name))

    def _send(
        self, send: Callable, timeout: float, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        content = (self.number, method, *args)
        return send(self.worker, serve_call, content, kwargs, timeout)


def own_name() -> str:
    """This worker's name; empty where there is no RPC."""
    joined = rpc.api._is_current_rpc_agent_set()
    return rpc.get_worker_info().name if joined else ""


_objects: list[Any] = []  # of this process, that have been referred to
_named: dict[str, Any] = {}  # those that are asked for by a name
_making = threading.RLock()


@rpc.functions.async_execution
def serve_call(
    number: int, method: str | Callable, *args: Any, **kwargs: Any
) -> Future:
    """Runs where a named object is, for a method, or a function of the object.

    Either may answer later, by a future.
    """
    value = _objects[number]
    if isinstance(method, str):
        result = getattr(value, method)(*args, **kwargs)
    else:
        result = method(value, *args, **kwargs)
    if isinstance(result, Future):
        return result
    future: Future = Future()
    future.set_result(result)
    return future


def _apply(function: Callable, rref: Any, *args: Any) -> Any:
    return function(rref.local_value(), *args)


class _Proxy:
    def __init__(self, method_of: Callable[[str], Callable]):
        self._method_of = method_of

    def __getattr__(self, name: str) -> Callable:
        return self._method_of(name)


def _answer(method: Callable, *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    return result.wait() if isinstance(result, Future) else result


def _in_thread(method: Callable, *args: Any, **kwargs: Any) -> Future:
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(_answer(method, *args, **kwargs))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
