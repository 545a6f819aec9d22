"""What an actor does to be a worker, apart from how it is started and called.

The ``driver`` makes it from a :class:`WorkerPlan`, has it ``play`` its role once all
have joined, and keeps calling ``take`` for its messages, which are those that a
launched worker sends its parent. An actor that is not called for long ends itself.
"""

import os
import pickle
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from cdopt_tutorial.engines.launcher import process
from cdopt_tutorial.engines.seam import network
from cdopt_tutorial.engines.torchrun import store
from cdopt_tutorial.engines.watch import pace
from cdopt_tutorial.engines.watch.errors import WorkerError

ALONE = 30.0  # seconds that a worker goes on without a call from the driver


class Actors(ABC):
    """How a library carries calls to a run's actors, from the driver or from another.

    What ``ask`` returns is the library's own, for ``wait`` or ``future``. Workers use
    it as a :class:`.Network`. Calls travel as bytes, since arrays that Ray delivers
    can't be written to.
    """

    worker = ""  # the caller; empty for the driver
    timeout = 0.0  # seconds for a call, 0 for no limit

    @abstractmethod
    def ask(self, worker: str, method: str, *args: Any) -> Any:
        """Begin a call of an actor's method."""

    @abstractmethod
    def wait(self, request: Any, timeout: float | None) -> Any:
        """The result, for which it waits so many seconds."""

    @abstractmethod
    def future(self, request: Any) -> futures.Future:
        """A future of the result."""

    @abstractmethod
    def named(self, worker: str) -> AbstractContextManager[None]:
        """Turns the library's errors of a call to a worker into our own."""

    def own_name(self) -> str:
        return self.worker

    def call(
        self,
        worker: str,
        function: Callable,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Any:
        request = self._ask(worker, function, args, kwargs)
        timeout = self.timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        with self.named(worker):
            return pickle.loads(self.wait(request, timeout or None))

    def call_async(self, worker: str, *call: Any) -> Future:
        future: Future = Future()

        def answer(done: futures.Future) -> None:
            try:
                with self.named(worker):
                    future.set_result(pickle.loads(done.result()))
            except Exception as error:
                future.set_exception(error)

        self.future(self._ask(worker, *call)).add_done_callback(answer)
        return future

    def _ask(
        self, worker: str, function: Callable, args: tuple = (), kwargs=None, *_: float
    ) -> Any:
        content = pickle.dumps((self.worker, function, args, kwargs or {}))
        return self.ask(worker, "call", content)


@dataclass(frozen=True)
class WorkerPlan:
    """What an actor needs to become a worker."""

    settings: process.Settings  #: of the run
    name: str  #: its own
    packed: bytes  #: its role
    path: list[str]  #: where modules are looked for
    join_deadline: float  #: seconds until the driver calls it for the first time


class ActorWorker(ABC):
    """A worker that plays a role and answers the others' calls."""

    def __init__(self, plan: WorkerPlan):
        self._name = plan.name
        self._messages: list[tuple] = []  # until the driver takes them
        self._until = time.monotonic() + plan.join_deadline + ALONE
        threading.Thread(target=self._end_alone, daemon=True).start()
        with self._failure_sent():  # or it would just be dead
            self._join(plan)
            self.send("phase", "running", socket.gethostname())

    @abstractmethod
    def _enter(self, plan: WorkerPlan) -> tuple[Actors, str]:
        """How to reach the others, and the network device for process groups."""

    def _join(self, plan: WorkerPlan) -> None:
        process.enter(plan.settings, self)
        # Named, so that the worker can be found in a host's /proc.
        self._pace = Path(f"/proc/self/fd/{os.memfd_create(plan.name)}")
        pace.begin(self._pace)
        others, os.environ["GLOO_SOCKET_IFNAME"] = self._enter(plan)
        others.worker, others.timeout = plan.name, plan.settings.rpc_timeout
        network.enter(others)
        process.forward_output()
        sys.path[:] = plan.path
        store.register_schemes()
        self._role = process.load(plan.settings, plan.packed)

    @contextmanager
    def _failure_sent(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.send("failed", process.describe(self._name, error))

    def send(self, kind: str, *content: Any) -> None:
        """Keep a message for the driver; in place of the pipe to a parent."""
        self._messages.append((kind, *content))

    def play(self) -> None:
        """Run the role, and keep its result for the driver."""
        with self._failure_sent():
            self.send("result", process.play(self._role))

    def call(self, content: bytes) -> bytes:
        """Run another worker's call."""
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
        """The messages since the last time, and the worker's progress.

        The deadline in it is in seconds from now, since clocks differ between hosts.
        """
        self._until = time.monotonic() + ALONE
        found = pace.read_pace(self._pace)
        if found is not None:
            found = found._replace(until=found.until - time.monotonic())
        taken = self._messages[:]
        del self._messages[: len(taken)]  # others may be added meanwhile
        return taken, found

    def _end_alone(self) -> None:
        """End once the driver is silent: a cluster would keep us for minutes."""
        while time.monotonic() < self._until:
            time.sleep(1)
        os._exit(1)
