"""One worker on Ray: what its actor does, and how it calls the others."""

import importlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from cdopt_tutorial.engines import network, network_store, pace, pack, process
from cdopt_tutorial.engines.errors import WorkerError, WorkerLost
from cdopt_tutorial.engines.on_ray import ALONE
from cdopt_tutorial.engines.store import device_of


class RayNetwork:
    """Calls between the actors of one run, which Ray finds by their names.

    Contents travel as bytes: Ray would hand on arrays that can't be written to.
    """

    def __init__(self, name: str, timeout: float):
        self._name, self._timeout = name, timeout
        self._handles: dict[str, Any] = {}

    def own_name(self) -> str:
        return self._name

    def call(
        self,
        worker: str,
        function: Callable,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Any:
        timeout = self._timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        asked = self._ask(worker, function, args, kwargs)
        with named(worker):
            return pickle.loads(ray.get(asked, timeout=timeout or None))

    def call_async(
        self,
        worker: str,
        function: Callable,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Future:
        future: Future = Future()

        def answer(done: Any) -> None:
            try:
                with named(worker):
                    future.set_result(pickle.loads(done.result()))
            except Exception as error:
                future.set_exception(error)

        self._ask(worker, function, args, kwargs).future().add_done_callback(answer)
        return future

    def _ask(self, worker: str, function, args, kwargs) -> ray.ObjectRef:
        if worker not in self._handles:
            self._handles[worker] = ray.get_actor(worker)
        content = pickle.dumps((self._name, function, args, kwargs or {}))
        return self._handles[worker].call.remote(content)


@contextmanager
def named(worker: str) -> Iterator[None]:
    """Turn Ray's errors of a call to a worker into the book's."""
    try:
        yield
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise WorkerLost(worker, "died", str(error)) from None
    except GetTimeoutError:
        raise TimeoutError(f"{worker} did not answer in time") from None


class _Told:
    """In place of the pipe to the parent: what is kept until the driver asks."""

    def __init__(self):
        self._messages: list[tuple] = []

    def send(self, kind: str, *content: Any) -> None:
        self._messages.append((kind, *content))

    def take(self) -> list[tuple]:
        taken = []
        while self._messages:
            taken.append(self._messages.pop(0))
        return taken


@dataclass(frozen=True)
class WorkerPlan:
    """What an actor needs to become a worker, and to become it again."""

    settings: process.Settings  #: of the run
    name: str  #: its own
    packed: bytes  #: its role
    path: list[str]  #: where modules are looked for
    join_deadline: float  #: seconds until the driver asks it for the first time


@ray.remote
class RayWorker:
    """An actor in which a role is played, and others' calls are answered."""

    def __init__(self, plan: WorkerPlan):
        self._name, self._told = plan.name, _Told()
        self._error: WorkerError | None = None
        self._until = time.monotonic() + plan.join_deadline + ALONE
        threading.Thread(target=self._end_alone, daemon=True).start()
        try:
            self._join(plan)
        except Exception as error:  # told when it is asked: else Ray says that it died
            self._error = process.describe(plan.name, error)

    def _join(self, plan: WorkerPlan) -> None:
        settings = plan.settings
        process.enter(settings, self._told)
        # Whoever looks into a host's /proc finds the worker by its memory's name.
        self._pace = Path(f"/proc/self/fd/{os.memfd_create(plan.name)}")
        pace.begin(self._pace)
        # Where Ray itself listens: the loopback's, or that of the cluster's node.
        own = ray.util.get_node_ip_address()
        os.environ["GLOO_SOCKET_IFNAME"] = device_of(own)
        sys.stdout = process.Forwarded(self._told, "stdout")
        sys.stderr = process.Forwarded(self._told, "stderr")
        sys.path[:] = plan.path
        network.enter(RayNetwork(plan.name, settings.rpc_timeout))
        network_store.accept_meetings()
        for module in settings.modules:
            importlib.import_module(module)
        attach, self._role = pack.unpack(plan.packed)
        torch.set_num_threads(self._role.num_threads)
        if attach is not None:
            attach()

    def host(self) -> str:
        """Where it runs, once it does."""
        if self._error is not None:
            raise self._error
        return socket.gethostname()

    def play(self) -> bytes:
        """Run the role; what it returned."""
        role = self._role
        try:
            return pickle.dumps(role.function(*role.args, **role.kwargs))
        except Exception as error:
            raise process.describe(self._name, error) from None

    def call(self, content: bytes) -> bytes:
        """Run what another worker asks for."""
        caller, function, args, kwargs = pickle.loads(content)
        try:
            result = function(*args, **kwargs)
            if isinstance(result, Future):
                result = result.wait()
            return pickle.dumps(result)
        except WorkerError:
            raise
        except Exception as error:
            cause = process.describe(self._name, error)
            reason = f"{cause.reason} in a call that {caller} made"
            raise WorkerError(self._name, reason, cause.details) from None

    def take(self) -> tuple[list[tuple], pace.Pace | None]:
        """What the role told since the last time, and how far it has come.

        Its deadline is in seconds from now: clocks differ from host to host.
        """
        self._until = time.monotonic() + ALONE
        found = pace.read_pace(self._pace)
        if found is not None:
            found = found._replace(until=found.until - time.monotonic())
        return self._told.take(), found

    def _end_alone(self) -> None:
        """End where the driver has gone silent: a cluster would keep us for minutes."""
        while time.monotonic() < self._until:
            time.sleep(1)
        os._exit(1)
