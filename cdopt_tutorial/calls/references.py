"""References to objects, on this worker or on another: the seam of all systems.

A reference has the interface of torch's ``RRef``. Where a process has no workers beside
it, all objects are its own, and every call is a plain one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.rpc import PyRRef
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from cdopt_tutorial.calls import network


@dataclass(frozen=True)
class Ref:
    """Names an object on a worker; calls through it cost less than through an RRef.

    It does not count its users, as an RRef does: so it pickles, and from then on the
    object stays until its worker ends. Methods may return a future, and be called while
    they call.
    """

    worker: str  #: name of the worker that has the object; empty where there are none
    number: int  #: of the object on that worker
    _value: Any = field(default=None, repr=False, compare=False)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """The object's methods, each of which waits for its result; in seconds."""
        return _Methods(partial(_call, self, timeout))

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """The same methods, each of which returns a future of torch at once."""
        return _Methods(partial(_call_async, self, timeout))

    def local_value(self) -> Any:
        """The object itself; a RuntimeError unless this worker owns it."""
        if not self.is_owner():
            here = network.current().own_name()
            raise RuntimeError(f"the object is on {self.worker}, not on {here}")
        return _sent.get(self.number, self._value)

    def is_owner(self) -> bool:
        """Whether the object is on this worker."""
        return self.worker == network.current().own_name()

    def owner_name(self) -> str:
        """Name of the worker that owns it; empty where there are no others."""
        return self.worker

    def __reduce__(self):
        if self.is_owner():
            _sent[self.number] = self.local_value()
        return Ref, (self.worker, self.number)


Reference = Ref | PyRRef  #: stands for an object, here or on another worker


def reference(value: Any) -> Ref:
    """The reference to an object of this process."""
    return Ref(network.current().own_name(), id(value), value)


def remote(worker: str, make: Callable, *args: Any, name: str = "") -> Ref:
    """Make an object on a worker; within a run, a name always gives the same object.

    Where there are no workers it is made here; then names are those of an
    :func:`alone`.
    """
    here = network.current()
    if here.own_name() in ("", worker):
        return _make(name, make, *args)
    return here.call(worker, _make, (name, make, *args))


def apply(reference: Reference, method: str | Callable, *args: Any) -> Any:
    """Run a method, by its name, or a function of an object on the object's owner."""
    return begin(reference, method, *args)()


def begin(reference: Reference, method: str | Callable, *args: Any) -> Callable:
    """The same, but return at once, from another worker: what is returned waits."""
    return _begin(reference, UNSET_RPC_TIMEOUT, method, *args)


def apply_async(reference: Reference, method: str | Callable, *args: Any) -> Future:
    """The same, but return a future of torch at once."""
    return _call_async(reference, UNSET_RPC_TIMEOUT, method, *args)


@contextmanager
def alone(at_once: bool = False) -> Iterator[None]:
    """A run in this process, as if it had no workers.

    ``rpc_async`` runs in a thread or, with ``at_once``, before it returns.
    """
    others = network.current()
    network.enter(network.Network(at_once))
    try:
        yield
    finally:
        network.enter(others)


_sent: dict[int, Any] = {}  # objects of this process to which others may refer
_making = threading.RLock()


def _make(name: str, make: Callable, *args: Any) -> Ref:
    """Runs where the object is to be."""
    if not name:
        return reference(make(*args))
    named = network.current().named
    with _making:
        if name not in named:
            named[name] = make(*args)
        return reference(named[name])


class _Methods:
    """An object's methods: ``call``, given their names."""

    def __init__(self, call: Callable):
        self._call = call

    def __getattr__(self, name: str) -> Callable:
        return partial(self._call, name)


def _call(reference: Reference, *call: Any, **kwargs: Any) -> Any:
    return _begin(reference, *call, **kwargs)()


def _begin(
    reference: Reference, timeout: float, method, /, *args: Any, **kwargs: Any
) -> Callable[[], Any]:
    if reference.is_owner():
        result = serve_call(reference, method, *args, **kwargs)
        return result.wait if isinstance(result, Future) else lambda: result
    call = serve_call, (reference, method, *args), kwargs, timeout
    return network.current().begin(reference.owner_name(), *call)


def _call_async(
    reference: Reference, timeout: float, method, /, *args: Any, **kwargs: Any
) -> Future:
    if reference.is_owner():
        run = partial(_call, reference, timeout, method, *args, **kwargs)
        return later(run, network.current().at_once)
    call = serve_call, (reference, method, *args), kwargs, timeout
    return network.current().call_async(reference.owner_name(), *call)


def serve_call(reference: Reference, method, /, *args: Any, **kwargs: Any) -> Any:
    """Run a call on the object's owner, in whichever thread answers it.

    A new thread must first learn how many threads it computes with. Torch sets that at
    the first parallel operator or backward pass, and a matrix product is neither: it
    would run on one thread, later ones on several, and differ in the last bits.
    """
    torch.get_num_threads()
    return call_method(reference.local_value(), method, *args, **kwargs)


def call_method(value: Any, method: str | Callable, /, *args: Any, **kwargs: Any):
    """Call a method by its name, or a function with the object before the arguments."""
    if isinstance(method, str):
        return getattr(value, method)(*args, **kwargs)
    return method(value, *args, **kwargs)


def later(call: Callable[[], Any], at_once: bool = False) -> Future:
    """A future of what a call returns, which runs in a thread or, at once, here."""
    future: Future = Future()
    run = partial(network.complete, future, call)
    if at_once:
        run()
    else:
        threading.Thread(target=run, daemon=True).start()
    return future
