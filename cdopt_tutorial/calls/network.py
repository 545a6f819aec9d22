"""How this process reaches the other workers: by torch RPC, unless it joins another."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed.rpc as rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from cdopt_tutorial.calls.errors import WorkerSilent, portable

LONGEST = 2e6  # seconds that torch, which counts milliseconds in 32 bits, can wait


class Network(Protocol):
    """Carries calls between workers."""

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
        """Run a function on a worker; if it returns a future, wait for that there.

        What the function or the future raises there is raised here. The timeout is in
        seconds, 0 for none, and by default the run's; then WorkerSilent is raised.
        """

    def call_async(self, worker: str, function: Callable, *more: Any) -> Future:
        """The same, but return a future of torch at once."""

    def patience(self) -> float | None:
        """The run's time-out in seconds, None for none."""


@dataclass(frozen=True)
class Alone:
    """No network: all objects are here."""

    at_once: bool  #: whether an asynchronous call runs before it returns

    def own_name(self) -> str:
        return ""

    def patience(self) -> float | None:
        return None


class RPC:
    """The RPC group that a worker has joined, if it has."""

    def own_name(self) -> str:
        return rpc.get_worker_info().name if rpc.api._is_current_rpc_agent_set() else ""

    def patience(self) -> float | None:
        seconds = rpc.get_rpc_timeout() if self.own_name() else LONGEST
        return None if seconds >= LONGEST else seconds

    def call(self, worker: str, *call: Any) -> Any:
        own, number = self.own_name(), next(_numbers)
        waits[number] = worker
        try:
            return received(rpc.rpc_sync(worker, _answer, *_message(own, *call)))
        except RuntimeError as error:
            raise _named(error, worker, own) from None
        finally:
            del waits[number]

    def call_async(self, worker: str, *call: Any) -> Future:
        own, number = self.own_name(), next(_numbers)
        answer: Future = Future()

        def finish(done: Future) -> None:
            del waits[number]
            try:
                answer.set_result(received(done.value()))
            except Exception as error:
                answer.set_exception(_named(error, worker, own))

        waits[number] = worker
        try:
            request = rpc.rpc_async(worker, _answer, *_message(own, *call))
        except BaseException:
            del waits[number]
            raise
        request.add_done_callback(finish)
        return answer


def _message(
    own: str,
    function: Callable,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> tuple[tuple, None, float]:
    """The arguments with which torch has ``_answer`` called, and its time-out."""
    return (own, function, args, kwargs or {}), None, min(timeout, LONGEST)


class Raised:
    """An answer: what the call raised, and what its own pickle may leave out."""

    def __init__(self, error: Exception):
        noted = "raised_on", "__notes__"
        kept = vars(error)
        self.error, self.noted = error, {k: kept[k] for k in noted if k in kept}


def received(answer: Any) -> Any:
    if isinstance(answer, Raised):
        vars(answer.error).update(answer.noted)
        raise answer.error
    return answer


@rpc.functions.async_execution
def _answer(caller: str, function: Callable, args: tuple, kwargs: dict) -> Future:
    """Runs on the worker that is called: a future of the result, or of Raised."""
    answer: Future = Future()
    serve(caller, function, args, kwargs, answer.set_result)
    return answer


def serve(
    caller: str,
    function: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    done: Callable[[Any], None],
) -> None:
    """Run another worker's call, and hand on the result, or Raised."""
    number, here = next(_numbers), current().own_name()
    answers[number] = caller
    try:
        result = function(*args, **kwargs)
    except BaseException as error:  # sys.exit too must not end a thread of torch's
        result = Raised(portable(error, here, caller))
    finally:
        del answers[number]
    if not isinstance(result, Future):
        done(result)
        return

    def finish(future: Future) -> None:
        try:
            value = future.value()
        except Exception as error:
            value = Raised(portable(error, here, caller))
        done(value)

    result.add_done_callback(finish)


def _named(error: Exception, worker: str, caller: str) -> Exception:
    """Torch's error of a call; where time has run out, one that says who was called."""
    if hasattr(error, "raised_on") or "more than set timeout" not in str(error):
        return error
    return WorkerSilent(worker, f"did not answer a call that {caller} made", str(error))


# Whom calls of this process wait for, and whose calls it is running now, by number.
waits: dict[int, str] = {}
answers: dict[int, str] = {}
_numbers = itertools.count()
_current: Network = RPC()


def current() -> Network:
    """The network that this process is in."""
    return _current


def enter(network: Network) -> None:
    """Reach the others by another network from now on."""
    global _current
    _current = network
