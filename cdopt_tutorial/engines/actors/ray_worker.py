"""A run's cluster and actors on Ray, and how they call each other.

Imported by the driver and the actors only: Ray reads the environment as it is imported.
"""

import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from cdopt_tutorial.engines.actors.actor import Actors, ActorWorker, WorkerPlan
from cdopt_tutorial.engines.launcher import process
from cdopt_tutorial.engines.launcher.group import STOPPED
from cdopt_tutorial.engines.torchrun.store import device_of
from cdopt_tutorial.engines.watch.errors import WorkerError, WorkerLost

WATCH = 0.5  # seconds between two looks at Ray's own processes
ANSWER = 5.0  # seconds for a cluster to answer at all
CLUSTER = 60.0  # seconds to join it
DAEMONS = "gcs_server", "raylet"  # of a cluster of this host, which the driver starts
OBJECTS = 200 * 2**20  # bytes of shared memory in which local actors pass objects


class RayActors(Actors):
    """Finds actors by their names, unless it has their handles already."""

    def __init__(self, handles: Mapping[str, Any] | None = None):
        self._handles = dict(handles or {})

    def ask(self, worker: str, method: str, *args: Any) -> ray.ObjectRef:
        if worker not in self._handles:
            self._handles[worker] = ray.get_actor(worker)
        return getattr(self._handles[worker], method).remote(*args)

    def wait(self, request: ray.ObjectRef, timeout: float | None) -> Any:
        return ray.get(request, timeout=timeout)  # faster than its future

    def future(self, request: ray.ObjectRef) -> futures.Future:
        return request.future()

    @contextmanager
    def named(self, worker: str) -> Iterator[None]:
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

    def _enter(self, plan: WorkerPlan) -> tuple[Actors, str]:
        # The device on which Ray itself listens.
        return RayActors(), device_of(ray.util.get_node_ip_address())


@contextmanager
def actors(plans: Sequence[WorkerPlan], address: str | None) -> Iterator[Actors]:
    """The actors of a run, on a new cluster of this host or on an existing one."""
    # A callee may call its caller: each needs a thread for each of the others.
    options = {"num_cpus": 1, "max_concurrency": 2 * len(plans) + 4}
    with cluster(plans, address):
        handles = {}
        for plan in plans:
            made = RayWorker.options(name=plan.name, **options)
            handles[plan.name] = made.remote(plan)
        yield RayActors(handles)


@contextmanager
def cluster(plans: Sequence[WorkerPlan], address: str | None) -> Iterator[None]:
    """Join Ray; a WorkerError if that fails, or if a process of Ray's ends."""
    # The names of actors are those of one run.
    options = {"namespace": secrets.token_hex(8), "log_to_driver": False}
    reason = f"can't join the cluster at {address}"
    if address is None:
        reason = "could not be started on this host"
        options |= _local(len(plans), plans[0].settings.folder)
    seconds = plans[0].join_deadline
    seconds = seconds if address is None else min(CLUSTER, seconds)
    # Ray itself tries for many minutes, for instance if only the cluster has TLS.
    late = WorkerError("ray", f"{reason} in {seconds:g} s")
    limit = threading.Timer(seconds, process.fail, [late])
    limit.start()
    try:
        if address not in (None, "auto"):
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), ANSWER).close()
        ray.init(address, configure_logging=False, **options)
    except (OSError, RuntimeError, RayError) as error:
        raise WorkerError("ray", reason, str(error)) from None
    finally:
        limit.cancel()
    over = threading.Event()
    threading.Thread(target=_watch_daemons, args=[over], daemon=True).start()
    try:
        yield
    finally:
        over.set()
        ray.shutdown()


def _local(workers: int, folder: str) -> dict[str, Any]:
    """Options of a cluster of this host, in a folder that only this user can enter.

    Ray opens its own folder to everybody.
    """
    inner = os.path.join(folder, "ray")
    os.mkdir(inner)
    # A socket's path has at most 107 characters, of which Ray takes 62.
    opened = os.open(inner, os.O_RDONLY | os.O_DIRECTORY)
    options = {"num_cpus": workers, "object_store_memory": OBJECTS}
    short = f"/proc/{os.getpid()}/fd/{opened}"
    return options | {"include_dashboard": False, "_temp_dir": short}


def _watch_daemons(over: threading.Event) -> None:
    """Fail the run if a daemon ends or is stopped, for which Ray itself would wait."""
    children = {each.name(): each for each in psutil.Process().children()}
    daemons = {name: children[name] for name in DAEMONS if name in children}
    stopped = dict.fromkeys(daemons, 0)  # in how many looks in a row
    while not over.wait(WATCH):
        for name, each in daemons.items():
            status = each.status() if each.is_running() else psutil.STATUS_ZOMBIE
            stopped[name] = stopped[name] + 1 if status == psutil.STATUS_STOPPED else 0
            if status == psutil.STATUS_ZOMBIE or stopped[name] * WATCH > STOPPED:
                process.fail(WorkerError("ray", f"has lost its {name}"))
                return
