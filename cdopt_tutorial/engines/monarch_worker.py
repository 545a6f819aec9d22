"""One worker on Monarch: its actor, and how it calls the others."""

import asyncio
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

# Its own module tells Monarch's time-outs and losses apart.
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, Future, concurrent_endpoint, current_rank

from cdopt_tutorial.engines import network
from cdopt_tutorial.engines.actor import ActorNetwork, ActorWorker, WorkerPlan
from cdopt_tutorial.engines.errors import WorkerLost
from cdopt_tutorial.engines.process import LOOPBACK


class MonarchNetwork(ActorNetwork):
    """Calls between actors whose handles the driver has given to all.

    By bytes, since Monarch is slow with tensors.
    """

    def __init__(self, name: str, timeout: float):
        super().__init__(name, timeout)
        self.handles: Mapping[str, Any] = {}
        self._waiting = ThreadPoolExecutor(thread_name_prefix="waiting")

    def _send(self, worker: str, content: bytes) -> Future:
        return self.handles[worker].call.call_one(content)

    def _wait(self, asked: Future, timeout: float | None) -> bytes:
        return answer_of(asked, timeout)

    def _when_done(self, asked: Future, answer: Callable) -> None:
        self._waiting.submit(answer, lambda: answer_of(asked))

    def _named(self, worker: str):
        return named(worker)


def answer_of(asked: Future, timeout: float | None = None) -> Any:
    """What a method of an actor has returned, or raised."""
    done, result = asked.get(timeout)
    if not done:
        raise pickle.loads(result)
    return result


@contextmanager
def named(worker: str) -> Iterator[None]:
    """Turn Monarch's errors of a call to a worker into the book's."""
    try:
        yield
    except SupervisionError as error:
        raise WorkerLost(worker, "died", str(error)) from None
    except TimeoutError:
        raise TimeoutError(f"{worker} did not answer in time") from None


class _Worker(ActorWorker):
    def _enter(self, plan: WorkerPlan) -> str:
        network.enter(MonarchNetwork(plan.name, plan.settings.rpc_timeout))
        return LOOPBACK


class MonarchWorker(Actor):
    """A worker that is an actor of Monarch; each plan is of one process."""

    def __init__(self, plans: list[WorkerPlan]):
        # Whoever is called may call the caller: each needs a thread for each other.
        self._threads = ThreadPoolExecutor(2 * len(plans) + 4)
        self._worker = _Worker(plans[current_rank().rank])

    @concurrent_endpoint
    async def host(self) -> tuple[bool, Any]:
        return await self._run(self._worker.host)

    @concurrent_endpoint
    async def play(self, handles: Mapping[str, Any]) -> tuple[bool, Any]:
        network.current().handles = handles
        return await self._run(self._worker.play)

    @concurrent_endpoint
    async def call(self, content: bytes) -> tuple[bool, Any]:
        return await self._run(self._worker.call, content)

    @concurrent_endpoint
    async def take(self) -> tuple[bool, Any]:
        return await self._run(self._worker.take)

    async def _run(self, method: Callable, *args: Any) -> tuple[bool, Any]:
        """In a thread, so that other calls are answered; errors keep their types."""
        loop = asyncio.get_running_loop()
        try:
            return True, await loop.run_in_executor(self._threads, method, *args)
        except Exception as error:
            return False, pickle.dumps(error)
