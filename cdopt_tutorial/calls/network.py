"""How this process reaches the other workers: by torch RPC, unless it joins another."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed.rpc as rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from cdopt_tutorial.calls.errors import portable, unanswered

LONGEST = 2e6  # seconds that torch, which counts milliseconds in 32 bits, can wait


class Network:
    """Carries calls between workers; this one has none, and all objects are here."""

    def __init__(self, at_once: bool = False):
        self.at_once = at_once  #: whether ``rpc_async`` runs here before it returns
        self.named: dict[str, Any] = {}  #: this process's objects that have a name

    def own_name(self) -> str:
        """This worker's name; empty where there are no others."""
        return ""

    def call(self, worker: str, function: Callable, *more: Any) -> Any:
        """Run a function on a worker; if it returns a future, wait for that there.

        ``more`` are its ``args`` and ``kwargs``, and a timeout in seconds, by default
        the run's, 0 for none; then WorkerSilent is raised. What the function or the
        future raises there is raised here.
        """
        return self.begin(worker, function, *more)()

    def begin(self, worker: str, function: Callable, *more: Any) -> Callable[[], Any]:
        """The same, but return at once: what is returned waits for the result."""
        return self.call_async(worker, function, *more).wait

    def call_async(self, worker: str, function: Callable, *more: Any) -> Future:
        """The same, but return a future of torch at once."""
        raise NotImplementedError


class RPC(Network):
    """The RPC group that a worker has joined, if it has."""

    def own_name(self) -> str:
        return rpc.get_worker_info().name if rpc.api._is_current_rpc_agent_set() else ""

    def begin(self, worker: str, *call: Any) -> Callable[[], Any]:
        request, take = self._ask(worker, *call)
        return partial(take, request)

    def call_async(self, worker: str, *call: Any) -> Future:
        return then(*self._ask(worker, *call))

    def _ask(
        self, worker, function, args=(), kwargs=None, timeout=UNSET_RPC_TIMEOUT
    ) -> tuple[Future, Callable]:
        """A future of the answer, and what takes the call's result from it."""
        caller = self.own_name()
        call = caller, function, args, kwargs or {}
        request = rpc.rpc_async(worker, serve, call, None, min(timeout, LONGEST))
        waits.add(request)

        def take(answer: Future) -> Any:
            try:
                brought = answer.wait()
            except RuntimeError as error:
                raise unanswered(error, worker, caller) from None
            finally:
                waits.remove(request)
            return received(brought)

        return request, take


class Raised:
    """An answer: what the call raised, and what its own pickle may leave out."""

    def __init__(self, error: Exception):
        noted = "raised_on", "__notes__"
        kept = vars(error)
        self.error, self.noted = error, {k: kept[k] for k in noted if k in kept}


def received(answer: Any) -> Any:
    """The result that an answer brings; what the call raised is raised."""
    if isinstance(answer, Raised):
        vars(answer.error).update(answer.noted)
        raise answer.error
    return answer


@rpc.functions.async_execution
def serve(caller: str, function: Callable, args: tuple, kwargs: dict) -> Future:
    """Runs on the worker that is called: a future of the result, or of Raised."""
    served: Future = Future()
    here = current().own_name()

    def answer(make: Callable[[], Any]) -> None:
        try:
            result = make()
        except BaseException as error:  # sys.exit too must not end a thread of torch's
            result = Raised(portable(error, here, caller))
        if isinstance(result, Future):
            result.add_done_callback(lambda future: answer(future.value))
        else:
            served.set_result(result)

    serves.add(served)
    answer(partial(function, *args, **kwargs))
    serves.remove(served)
    return served


def complete(future: Future, make: Callable[[], Any]) -> None:
    """Complete a future with what a function returns or raises."""
    try:
        result = make()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def then(future: Future, change: Callable[[Future], Any]) -> Future:
    """``Future.then``, except that errors keep their classes."""
    changed: Future = Future()
    future.add_done_callback(lambda done: complete(changed, partial(change, done)))
    return changed


# What calls of this process wait for, and those of others that it is running now.
waits: set[Future] = set()
serves: set[Future] = set()
_current: Network = RPC()


def current() -> Network:
    """The network that this process is in."""
    return _current


def enter(network: Network) -> None:
    """Reach the others by another network from now on, which has no objects yet."""
    global _current
    _current = network
