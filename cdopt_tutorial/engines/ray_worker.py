"""One worker on Ray: its actor, and how it calls the others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from cdopt_tutorial.engines import network
from cdopt_tutorial.engines.actor import ActorNetwork, ActorWorker, WorkerPlan
from cdopt_tutorial.engines.errors import WorkerLost
from cdopt_tutorial.engines.store import device_of


class RayNetwork(ActorNetwork):
    """Calls between actors that Ray finds by their names.

    By bytes, since Ray would hand on arrays that can't be written to.
    """

    def __init__(self, name: str, timeout: float):
        super().__init__(name, timeout)
        self._handles: dict[str, Any] = {}

    def _send(self, worker: str, content: bytes) -> ray.ObjectRef:
        if worker not in self._handles:
            self._handles[worker] = ray.get_actor(worker)
        return self._handles[worker].call.remote(content)

    def _wait(self, asked: ray.ObjectRef, timeout: float | None) -> bytes:
        return ray.get(asked, timeout=timeout)

    def _when_done(self, asked: ray.ObjectRef, answer: Callable) -> None:
        asked.future().add_done_callback(lambda done: answer(done.result))

    def _named(self, worker: str):
        return named(worker)


@contextmanager
def named(worker: str) -> Iterator[None]:
    """Turn Ray's errors of a call to a worker into the book's."""
    try:
        yield
    except RayTaskError as error:
        raise error.cause from None
    except ActorUnavailableError as error:  # its process may still be there
        raise WorkerLost(worker, "can't be reached", str(error)) from None
    except RayActorError as error:
        raise WorkerLost(worker, "died", str(error)) from None
    except GetTimeoutError:
        raise TimeoutError(f"{worker} did not answer in time") from None


@ray.remote
class RayWorker(ActorWorker):
    """A worker that is an actor of Ray."""

    def _enter(self, plan: WorkerPlan) -> str:
        network.enter(RayNetwork(plan.name, plan.settings.rpc_timeout))
        # Where Ray itself listens: the loopback's, or that of the cluster's node.
        return device_of(ray.util.get_node_ip_address())
