"""References to objects, on this worker or on another: the seam of all systems.

A reference has the interface of torch's ``RRef``, which is one; here are two more.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from cdopt_tutorial.engines.seam import network


class Reference(Protocol):
    """Stands for an object, here or on another worker; the interface of ``RRef``."""

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """The object's methods, each of which waits for its answer; in seconds."""

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """The same methods, each of which returns a future of torch at once."""

    def local_value(self) -> Any:
        """The object itself; a RuntimeError unless this worker owns it."""

    def is_owner(self) -> bool:
        """Whether the object is on this worker."""

    def owner_name(self) -> str:
        """Name of the worker that owns it; empty where there are no others."""


_INTERFACE = [name for name in vars(Reference) if not name.startswith("_")]


def is_reference(value: Any) -> bool:
    """Whether something has the interface of a reference."""
    return all(hasattr(type(value), name) for name in _INTERFACE)


def apply(reference: Reference, method: str | Callable, *args: Any) -> Any:
    """Run a method, by its name, or a function of an object on the object's owner."""
    if reference.is_owner():
        return _answer(reference.local_value(), method, *args)
    if isinstance(reference, Ref):
        content = (reference.number, method, *args)
        return network.current().call(reference.worker, serve_call, content)
    return rpc.rpc_sync(reference.owner(), _apply, args=(reference, method, *args))


class LocalRef:
    """A reference to an object of this process; ``rpc_async`` runs in a thread."""

    def __init__(self, value: Any):
        self._value = value

    def local_value(self) -> Any:
        return self._value

    def is_owner(self) -> bool:
        return True

    def owner_name(self) -> str:
        return ""  # there are no workers

    def rpc_sync(self, timeout: float = 0) -> "_Proxy":
        return _Proxy(partial(_answer, self._value))

    def rpc_async(self, timeout: float = 0) -> "_Proxy":
        return _Proxy(partial(_in_thread, self._value))


@dataclass(frozen=True)
class Ref:
    """Names an object on a worker; a call through it costs half of one by an RRef.

    It counts no users, as an RRef does: it pickles, and the object stays until its
    worker ends. Methods may answer later, by a future, and be called while they call.
    """

    worker: str  #: name of the worker that has the object; empty without others
    number: int  #: of the object on that worker

    @staticmethod
    def to(value: Any) -> "Ref":
        """The one reference to an object of this process."""
        with _making:
            numbers = (i for i, known in enumerate(_objects) if known is value)
            number = next(numbers, len(_objects))
            if number == len(_objects):
                _objects.append(value)
            return Ref(network.current().own_name(), number)

    @staticmethod
    def named(name: str, make: Callable, *args: Any) -> "Ref":
        """The same to the object of a name; whoever asks first has it made."""
        with _making:
            if name not in _named:
                _named[name] = make(*args)
            return Ref.to(_named[name])

    def local_value(self) -> Any:
        if not self.is_owner():
            here = network.current().own_name()
            raise RuntimeError(f"the object is on {self.worker}, not on {here}")
        return _objects[self.number]

    def is_owner(self) -> bool:
        return self.worker == network.current().own_name()

    def owner_name(self) -> str:
        return self.worker

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> "_Proxy":
        there = network.current().call
        return _Proxy(partial(self._call, _answer, there, timeout))

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> "_Proxy":
        there = network.current().call_async
        return _Proxy(partial(self._call, _in_thread, there, timeout))

    def _call(self, here, there, timeout, method, /, *args: Any, **kwargs: Any) -> Any:
        if self.is_owner():
            return here(self.local_value(), method, *args, **kwargs)
        content = (self.number, method, *args)
        return there(self.worker, serve_call, content, kwargs, timeout)


_objects: list[Any] = []  # of this process, that have been referred to
_named: dict[str, Any] = {}  # those that are asked for by a name
_making = threading.RLock()


class _Proxy:
    """Its methods are ``call``, given their names."""

    def __init__(self, call: Callable):
        self._call = call

    def __getattr__(self, name: str) -> Callable:
        return partial(self._call, name)


def call_method(value: Any, method: str | Callable, /, *args: Any, **kwargs: Any):
    """Call a method by its name, or a function with the object before the arguments."""
    if isinstance(method, str):
        return getattr(value, method)(*args, **kwargs)
    return method(value, *args, **kwargs)


@rpc.functions.async_execution
def serve_call(number: int, method, /, *args: Any, **kwargs: Any) -> Future:
    """Runs where a named object is; what it calls may answer later, by a future."""
    result = _serve(_objects[number], method, *args, **kwargs)
    if isinstance(result, Future):
        return result
    future: Future = Future()
    future.set_result(result)
    return future


def _apply(rref: Any, method: str | Callable, *args: Any) -> Any:
    return _serve(rref.local_value(), method, *args)


def _serve(value: Any, method, /, *args: Any, **kwargs: Any) -> Any:
    """What a call leads to, in whichever thread answers it.

    The thread learns before with how many it computes. Torch would tell it at its first
    parallel operator, or way back, and a product of matrices is neither: one thread
    would compute it, and later ones several, with other bits.
    """
    torch.get_num_threads()
    return call_method(value, method, *args, **kwargs)


def _answer(value: Any, method, /, *args: Any, **kwargs: Any) -> Any:
    result = _serve(value, method, *args, **kwargs)
    return result.wait() if isinstance(result, Future) else result


def _in_thread(value: Any, method: str, /, *args: Any, **kwargs: Any) -> Future:
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(_answer(value, method, *args, **kwargs))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
