"""A run's actors on Monarch, and how they call each other.

Imported by the driver and the actors only: Monarch starts threads as it is imported.
"""

import asyncio
import pickle
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import monarch.actor as monarch

# Its own module tells Monarch's time-outs and losses apart.
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, concurrent_endpoint, current_rank

from cdopt_tutorial.engines.actors.actor import Actors, ActorWorker, WorkerPlan
from cdopt_tutorial.engines.launcher.process import LOOPBACK
from cdopt_tutorial.engines.watch.errors import WorkerLost


class MonarchActors(Actors):
    """Reaches actors by handles, which the driver sends each with the call to play."""

    def __init__(self, num_workers: int, handles: Mapping[str, Any] | None = None):
        self.handles = handles or {}
        self._waiting = futures.ThreadPoolExecutor(2 * num_workers + 4)

    def ask(self, worker: str, method: str, *args: Any) -> monarch.Future:
        given = (self.handles,) if method == "play" else args
        return self.handles[worker].do.call_one(method, *given)

    def wait(self, request: monarch.Future, timeout: float | None) -> Any:
        done, result = request.get(timeout)
        if not done:
            raise pickle.loads(result)
        return result

    def future(self, request: monarch.Future) -> futures.Future:
        return self._waiting.submit(self.wait, request, None)

    @contextmanager
    def named(self, worker: str) -> Iterator[None]:
        try:
            yield
        except SupervisionError as error:
            raise WorkerLost(worker, "died", str(error)) from None
        except TimeoutError:
            raise TimeoutError(f"{worker} did not answer in time") from None


class _Worker(ActorWorker):
    def _enter(self, plan: WorkerPlan) -> tuple[Actors, str]:
        self._others = MonarchActors(plan.settings.world_size)
        return self._others, LOOPBACK

    def play(self, handles: Mapping[str, Any]) -> None:
        self._others.handles = handles
        super().play()


class MonarchWorker(Actor):
    """A worker that is an actor of Monarch; there is a plan for each process."""

    def __init__(self, plans: Sequence[WorkerPlan]):
        # A callee may call its caller: each needs a thread for each of the others.
        self._threads = futures.ThreadPoolExecutor(2 * len(plans) + 4)
        self._worker = _Worker(plans[current_rank().rank])

    @concurrent_endpoint
    async def do(self, method: str, *args: Any) -> tuple[bool, Any]:
        """Call in a thread, so that others are answered; errors keep their types."""
        loop, run = asyncio.get_running_loop(), getattr(self._worker, method)
        try:
            return True, await loop.run_in_executor(self._threads, run, *args)
        except Exception as error:
            return False, pickle.dumps(error)


@contextmanager
def actors(plans: Sequence[WorkerPlan]) -> Iterator[Actors]:
    """The actors of a run, each in a process of its own on this host."""
    # By default Monarch ends this process when one dies, without saying which.
    monarch.unhandled_fault_hook = lambda failure: None
    mesh = monarch.this_host().spawn_procs(per_host={"workers": len(plans)})
    made = mesh.spawn("worker", MonarchWorker, plans)
    handles = {each.name: made.slice(workers=rank) for rank, each in enumerate(plans)}
    yield MonarchActors(len(plans), handles)
