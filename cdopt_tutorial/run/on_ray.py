"""A run on Ray: its workers are actors, on this host or on a cluster.

``play`` starts a driver, a process of its own, in which alone Ray is imported; it makes
the actors, and hands on what they say.
"""

import os
import pickle
import queue
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from cdopt_tutorial import torchrun
from cdopt_tutorial.calls import apply, errors, network, remote
from cdopt_tutorial.calls.references import later
from cdopt_tutorial.run import forking, pack, worker
from cdopt_tutorial.run.group import Group
from cdopt_tutorial.run.worker import Role, Settings

# By default Ray serves any caller, reports to its makers, and listens on all devices.
QUIET = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
OBJECTS = 200 * 2**20  # bytes of shared memory in which local actors pass objects


def check(on: str, *probes: Any) -> str | None:
    """The address of the cluster, None for this host; a ValueError if Ray can't run."""
    if not (wish := re.fullmatch(r"ray(?::(auto|[^:]+:\d{1,5}))?", on)):
        allowed = "rpc, ray, ray:auto or ray:HOST:PORT"
        raise ValueError(f"on is {on!r}, but must be {allowed}")
    if find_spec("ray") is None:
        install = "pip install 'cdopt-tutorial[ray]'"
        raise ValueError(f"the engine ray needs Ray, which is not here: {install}")
    if torchrun.is_here():
        raise ValueError("the engine ray starts its workers itself, not torchrun")
    if any(probe is not None for probe in probes):
        raise ValueError("a trace or a wire is of torch RPC, and not of the engine ray")
    return wish[1]


def play(
    address: str | None,
    settings: Settings,
    packed: Mapping[str, bytes],
    on_report: Callable[[str, Any], None] | None,
) -> dict[str, tuple]:
    """What the roles returned, by name; with places for calls and bytes."""
    environment = settings.environment
    # In a network of its own it would reach no cluster.
    process = forking.Process if address is None else forking.OutsideProcess
    if address is None:
        # Without what is of a job that this program is part of, perhaps.
        environment = {k: v for k, v in environment.items() if k[:4] != "RAY_"}
        environment |= QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    start = partial(_start, address, settings.folder, len(packed))
    driver, modules = pack.pack({"ray": (start, Role(_drive, (settings, packed)))})
    alone = replace(
        settings,
        world_size=1,
        join_deadline=2 * settings.join_deadline,  # for the driver, and then for Ray
        modules=modules,
        environment=environment,
    )
    returned, _, _ = Group(alone, driver, on_report, process).run()["ray"]
    results = pickle.loads(returned)
    return {name: (result, None, None) for name, result in results.items()}


_guard: subprocess.Popen | None = None


def _start(address: str | None, folder: str, workers: int) -> None:
    """Attached to the driver: start a cluster of this host, or join an existing one."""
    import ray

    global _guard
    # It kills this process's group as soon as this one, which has the other end of its
    # pipe, ends. Else Ray's agents would stay a minute.
    command = ["sh", "-c", 'read _; kill -9 "-$0"', str(os.getpgid(0))]
    _guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    # What Ray prints goes into the log, which a failure shows.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w")
    options: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    if address is None:
        options |= {"num_cpus": workers, "object_store_memory": OBJECTS}
        options["include_dashboard"] = False
        # In a folder that only this user can enter, since Ray opens its own to all; by
        # a short path, since a socket's has at most 107 characters.
        os.mkdir(inner := os.path.join(folder, "ray"))
        opened = os.open(inner, os.O_RDONLY | os.O_DIRECTORY)
        options["_temp_dir"] = f"/proc/{os.getpid()}/fd/{opened}"
    try:
        # Ray tries for many minutes, but the parent waits only until its deadline.
        ray.init(address or "local", **options)
    except Exception as error:
        what = f"join the cluster at {address}" if address else "start on this host"
        raise errors.WorkerError("ray", f"could not {what}", str(error)) from None


def _drive(settings: Settings, packed: Mapping[str, bytes]) -> dict[str, bytes]:
    """The driver's role: what the workers' roles returned, by name, pickled."""
    import ray

    # A callee may call its caller: each needs a thread for each of the others.
    options = {"num_cpus": 1, "max_concurrency": 2 * len(packed) + 4}
    kind = ray.remote(RayWorker).options(**options)
    actors: dict[str, Any] = {n: kind.remote(n, settings) for n in packed}
    streams = {actors[name].play.remote(packed[name]): name for name in packed}
    results = _follow(actors, streams, settings.join_deadline)
    ray.shutdown()
    return results


def _follow(
    actors: Mapping[str, Any], streams: dict[Any, str], join_deadline: float
) -> dict[str, bytes]:
    """Hand on the messages of each worker's stream, until all have ended."""
    import ray

    limit, joined = time.monotonic() + join_deadline, set[str]()
    results: dict[str, bytes] = {}
    while streams:
        late = [name for name in actors if name not in joined]
        left = max(0.0, limit - time.monotonic()) if late else None
        ready, _ = ray.wait(list(streams), timeout=left)
        if not ready:
            reason = f"missed the deadline of {join_deadline:g} s to join"
            raise errors.WorkerError(late[0], reason)
        messages: Any = ready[0]
        name = streams.pop(messages)
        with _named(name, "ray"):
            message = next(map(ray.get, messages), None)
        if message is None:
            continue
        streams[messages] = name  # behind the others
        match message:
            case "joined", _:
                joined.add(name)
                if len(joined) == len(actors):
                    for actor in actors.values():
                        actor.meet.remote(actors)
            case "result", _, result:
                results[name] = result
                if len(results) == len(actors):
                    for actor in actors.values():
                        actor.end.remote()
            case "failed", _, error:
                raise error
            case kind, _, content:
                assert worker.send is not None  # of the driver, a worker itself
                worker.send(kind, name, content)
    return results


class RayWorker(network.Network):
    """A worker that is an actor of Ray; it is the network of its process.

    Calls travel as bytes, since Ray is slow with tensors.
    """

    def __init__(self, name: str, settings: Settings):
        super().__init__()
        self._name, self._settings = name, settings
        self._messages: queue.SimpleQueue = queue.SimpleQueue()
        self._begun = threading.Event()
        self._send = lambda *message: self._messages.put(message)

    def play(self, packed: bytes) -> Iterator[tuple]:
        """Play the role; what this worker says, until it is told to `end`."""
        threading.Thread(target=self._run, args=(packed,), daemon=True).start()
        while message := self._messages.get():
            yield message

    def meet(self, actors: Mapping[str, Any]) -> None:
        """All have joined: call these from now on, and play the role."""
        self._actors = actors
        self._begun.set()

    def end(self) -> None:
        """No more messages are wanted than those so far."""
        self._messages.put(None)

    def answer(self, caller: str, content: bytes) -> bytes:
        """Run another worker's call: the result, or what it raised."""
        self._begun.wait()
        try:
            return pickle.dumps(network.serve(caller, *pickle.loads(content)).wait())
        except Exception as error:  # it does not pickle
            raised = network.Raised(errors.portable(error, self._name, caller))
            return pickle.dumps(raised)

    def own_name(self) -> str:
        return self._name

    def call_async(
        self, worker, function, args=(), kwargs=None, timeout=UNSET_RPC_TIMEOUT
    ) -> Future:
        import ray

        content = pickle.dumps((function, args, kwargs or {}))
        default = self._settings.rpc_timeout
        seconds = default if timeout == UNSET_RPC_TIMEOUT else timeout
        with _named(worker, self._name):
            request = self._actors[worker].answer.remote(self._name, content)

        def take() -> Any:
            with _named(worker, self._name):
                answer = ray.get(request, timeout=seconds or None)
            return network.received(pickle.loads(answer))

        return later(take)  # in a thread, since a future of Ray's knows no time-out

    def _run(self, packed: bytes) -> None:
        """Join, and play the role."""
        import ray

        device = worker.interface(ray.util.get_node_ip_address())
        os.environ["GLOO_SOCKET_IFNAME"] = device
        network.enter(self)
        worker.enter(self._name, self._send, self._open_store, self._settings)
        worker.print_to(self._name, self._send)
        try:
            role = worker.load(self._settings, packed)
            self._send("joined", self._name)
            self._begun.wait()
            returned = role.function(*role.args)
            self._send("result", self._name, pickle.dumps(returned))
        except BaseException as error:
            self._send("failed", self._name, errors.describe(self._name, error))

    def _open_store(self, _: int) -> dist.Store:
        """A store that the run's first worker keeps."""
        kept = remote(next(iter(self._actors)), _make_store, name="store of groups")
        return dist.TCPStore(*apply(kept, attrgetter("host", "port")))


@contextmanager
def _named(name: str, caller: str) -> Iterator[None]:
    """Turn Ray's errors of a call to a worker into ours, which name it."""
    from ray import exceptions

    try:
        yield
    except exceptions.ActorUnavailableError as error:  # its process may still be there
        raise errors.WorkerLost(name, "can't be reached", str(error)) from None
    except exceptions.RayActorError as error:
        raise errors.WorkerLost(name, "died", str(error)) from None
    except exceptions.GetTimeoutError:
        reason = f"did not answer a call that {caller} made"
        raise errors.WorkerSilent(name, reason) from None


def _make_store() -> dist.TCPStore:
    import ray

    host = ray.util.get_node_ip_address()  # on which Ray itself listens here
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
