"""A run on Ray: its workers are actors, on this host or on a cluster.

``play`` starts a driver, a process of its own, in which alone Ray is imported; it makes
the actors, has each play its role, and passes on what they say. Actors reach each other
through :class:`RayNetwork`.
"""

import os
import pickle
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future
from torch.multiprocessing import _set_thread_name

from cdopt_tutorial import own_network, torchrun
from cdopt_tutorial.calls import network
from cdopt_tutorial.calls.errors import (
    WorkerError,
    WorkerLost,
    WorkerSilent,
    describe,
    portable,
)
from cdopt_tutorial.calls.references import later
from cdopt_tutorial.run import pack, worker
from cdopt_tutorial.run.group import Group, show_line
from cdopt_tutorial.run.interface import device_of
from cdopt_tutorial.run.worker import Role, Settings

# By default Ray serves any caller, reports to its makers, and listens on all devices.
QUIET = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
OBJECTS = 200 * 2**20  # bytes of shared memory in which local actors pass objects
END = None  # in place of an actor's message


def check(on: str, *probes: Any) -> str | None:
    """The address of the cluster, None for this host; a ValueError if Ray can't run."""
    kind, _, address = on.partition(":")
    if kind != "ray":
        allowed = "rpc, ray, ray:auto or ray:HOST:PORT"
        raise ValueError(f"on is {on!r}, but must be {allowed}")
    if address and not re.fullmatch(r"auto|[^:]+:\d{1,5}", address):
        allowed = "host:port, or auto for that of this host"
        raise ValueError(f"address is {address!r}, but must be {allowed}")
    if find_spec("ray") is None:
        install = "pip install 'cdopt-tutorial[ray]'"
        raise ValueError(f"the engine ray needs Ray, which is not here: {install}")
    if torchrun.is_here():
        raise ValueError("the engine ray starts its workers itself, not torchrun")
    if any(probe is not None for probe in probes):
        raise ValueError("a trace or a wire is of torch RPC, and not of the engine ray")
    return address or None


def play(
    address: str | None,
    settings: Settings,
    packed: Mapping[str, bytes],
    on_report: Callable[[str, Any], None] | None,
    deadlines: tuple[float, float],
) -> dict[str, tuple]:
    """What the roles returned, by name; with places for calls and bytes."""

    def pass_on(_: str, message: tuple) -> None:
        name, stream, content = message
        if stream == "failed":
            raise content
        if stream != "report":
            show_line(name, stream, content)
        elif on_report is not None:
            on_report(name, pack.loads(name, "reported", content))

    role = Role(_drive, (address, settings, packed, deadlines[1]))
    driver, modules = pack.pack({"ray": (None, role)})
    alone = replace(settings, world_size=1, modules=modules)
    with nullcontext() if address is None else _in_host_network():
        results, _, _ = Group(alone, driver, pass_on).run(*deadlines)["ray"]
    return {
        name: (pack.loads(name, "returned", results[name]), None, None)
        for name in packed
    }


@contextmanager
def _in_host_network() -> Iterator[None]:
    """Let the driver reach a cluster, which it can't in a network of its own."""
    before = os.environ.get(own_network.VARIABLE)
    os.environ[own_network.VARIABLE] = "host"
    try:
        yield
    finally:
        os.environ.pop(own_network.VARIABLE)
        if before is not None:
            os.environ[own_network.VARIABLE] = before


def _drive(
    address: str | None,
    settings: Settings,
    packed: Mapping[str, bytes],
    join_deadline: float,
) -> dict[str, bytes]:
    """The driver's role: what the workers' roles returned, by name, pickled."""
    _guard()
    if address is None:  # not later: Ray reads the environment as it is imported
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]  # of a job that this program is part of, perhaps
        os.environ |= QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # What Ray prints goes into the log, which a failure shows.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w")
    import ray

    with _cluster(address, len(packed), settings.folder, join_deadline):
        # A callee may call its caller: each needs a thread for each of the others.
        many = {"num_cpus": 1, "max_concurrency": 2 * len(packed) + 4}
        kind, first = ray.remote(RayWorker), next(iter(packed))
        actors = {
            name: kind.options(name=name, **many).remote(settings, name, first, content)
            for name, content in packed.items()
        }
        try:
            _join_all(actors, join_deadline)
            return _follow_all(actors)
        except WorkerError as error:  # now, since leaving a cluster can go wrong, too
            worker.report((error.worker, "failed", error))
            raise


def _guard() -> None:
    """Start a process that kills this one's group as soon as this one has ended.

    If this one were killed, Ray's agents would stay a minute.
    """
    read, _ = os.pipe()  # only this process has the other end, and never closes it
    command = ["sh", "-c", 'read _; kill -9 "-$0"', str(os.getpgid(0))]
    moved = [(os.POSIX_SPAWN_DUP2, read, 0)]
    os.posix_spawnp("sh", command, os.environ, setsid=True, file_actions=moved)
    os.close(read)


@contextmanager
def _cluster(
    address: str | None, workers: int, folder: str, join_deadline: float
) -> Iterator[None]:
    """A new cluster of this host, or an existing one; a WorkerError if that fails."""
    import ray

    # The names of actors are those of one run.
    options: dict[str, Any] = {
        "namespace": secrets.token_hex(8),
        "log_to_driver": False,
    }
    if address is None:
        # In a folder that only this user can enter, since Ray opens its own to all; by
        # a short path, since a socket's has at most 107 characters.
        os.mkdir(inner := os.path.join(folder, "ray"))
        opened = os.open(inner, os.O_RDONLY | os.O_DIRECTORY)
        options["_temp_dir"] = f"/proc/{os.getpid()}/fd/{opened}"
        options |= {"num_cpus": workers, "object_store_memory": OBJECTS}
        options["include_dashboard"] = False
    where = f"join the cluster at {address}" if address else "start on this host"
    # Ray itself tries for many minutes, for instance if only the cluster has TLS.
    reason = f"could not {where} in {join_deadline:g} s"
    late = "ray", "failed", WorkerError("ray", reason)
    seconds = min(join_deadline, threading.TIMEOUT_MAX)
    limit = threading.Timer(seconds, worker.report, [late])
    limit.daemon = True
    limit.start()
    try:
        ray.init(address or "local", configure_logging=False, **options)
    except Exception as error:
        raise WorkerError("ray", f"could not {where}", str(error)) from None
    finally:
        limit.cancel()
    try:
        yield
    finally:
        ray.shutdown()


def _join_all(actors: Mapping[str, Any], join_deadline: float) -> None:
    """Wait until all actors are workers; a WorkerError names one that is not."""
    import ray

    joining = {actor.join.remote(): name for name, actor in actors.items()}
    ready, late = ray.wait(
        list(joining), num_returns=len(joining), timeout=join_deadline
    )
    for request in ready:
        with _named(joining[request], "ray"):
            ray.get(request)
    for request in late:
        reason = f"missed the deadline of {join_deadline:g} s to join"
        raise WorkerError(joining[request], reason)


def _follow_all(actors: Mapping[str, Any]) -> dict[str, bytes]:
    """Have all roles played, and pass on what workers say, until each has ended."""
    messages: queue.SimpleQueue = queue.SimpleQueue()
    for name, actor in actors.items():
        arguments = name, actor, messages.put
        threading.Thread(target=_follow, args=arguments, daemon=True).start()
    results: dict[str, bytes] = {}
    open_ = set(actors)
    while open_:
        name, kind, content = messages.get()
        match kind:
            case "result":
                results[name] = content
                if len(results) == len(actors):
                    for actor in actors.values():
                        actor.end.remote()
            case "failed":
                raise content
            case "ended":
                open_.discard(name)
            case _:
                worker.report((name, kind, content))
    return results


def _follow(name: str, actor: Any, put: Callable[[tuple], None]) -> None:
    """Take one worker's messages until it has no more."""
    import ray

    try:
        with _named(name, "ray"):
            for message in actor.play.remote():
                put((name, *ray.get(message)))
        put((name, "ended", None))
    except Exception as error:
        put((name, "failed", describe(name, error)))


class RayWorker:
    """A worker that is an actor of Ray; the driver calls `join`, `play` and `end`."""

    def __init__(self, settings: Settings, name: str, first: str, packed: bytes):
        self._settings, self._name, self._first = settings, name, first
        self._packed = packed
        self._messages: queue.SimpleQueue = queue.SimpleQueue()

    def join(self) -> None:
        """Become a worker; a WorkerError if its role can't be loaded."""
        import ray

        # The device on which Ray itself listens.
        os.environ["GLOO_SOCKET_IFNAME"] = device_of(ray.util.get_node_ip_address())
        timeout = self._settings.rpc_timeout
        network.enter(RayNetwork(self._name, timeout))
        worker.enter(
            lambda record: self._messages.put(("report", pack.dumps(record))),
            lambda world_size: _open_store(self._first),
            timeout,
        )
        for stream in "stdout", "stderr":
            setattr(sys, stream, _Lines(stream, self._messages.put))
        try:
            self._role = worker.load(self._settings, self._packed)
        except BaseException as error:
            raise describe(self._name, error) from None

    def play(self) -> Iterator[tuple]:
        """Play the role in a thread; messages, until the driver says it is over."""
        _set_thread_name(self._name)  # by which the worker is found in a host's /proc
        threading.Thread(target=self._play, daemon=True).start()
        while (message := self._messages.get()) is not END:
            yield message

    def _play(self) -> None:
        try:
            self._messages.put(("result", worker.play(self._role)))
        except BaseException as error:
            self._messages.put(("failed", describe(self._name, error)))

    def end(self) -> None:
        """No more messages are wanted than those so far."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._messages.put(END)

    def call(self, caller: str, content: bytes) -> bytes:
        """Run another worker's call: the result, or what it raised."""
        answer: futures.Future = futures.Future()
        try:
            network.serve(caller, *pickle.loads(content), answer.set_result)
            return pack.dumps(answer.result())
        except Exception as error:  # it does not pickle
            return pickle.dumps(network.Raised(portable(error, self._name, caller)))


class _Lines:
    """A text stream whose lines are messages."""

    encoding, errors = "utf-8", "replace"

    def __init__(self, stream: str, put: Callable[[tuple], None]):
        self._stream, self._put, self._line = stream, put, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._put((self._stream, line))
        return len(text)

    def flush(self) -> None:
        if self._line:
            self.write("\n")

    def isatty(self) -> bool:
        return False


class RayNetwork:
    """Carries calls between a run's actors, as bytes: Ray is slow with tensors."""

    def __init__(self, name: str, timeout: float):
        self._name, self._timeout = name, timeout
        self._actors: dict[str, Any] = {}

    def own_name(self) -> str:
        return self._name

    def patience(self) -> float | None:
        return self._timeout or None

    def call(self, worker, function, args=(), kwargs=None, timeout=UNSET_RPC_TIMEOUT):
        return self._wait(worker, self._ask(worker, function, args, kwargs), timeout)

    def call_async(
        self, worker, function, args=(), kwargs=None, timeout=UNSET_RPC_TIMEOUT
    ) -> Future:
        request = self._ask(worker, function, args, kwargs)
        # In a thread, since a future of Ray's knows no time-out.
        return later(partial(self._wait, worker, request, timeout))

    def _wait(self, worker: str, request: Any, timeout: float) -> Any:
        import ray

        seconds = self.patience() if timeout == UNSET_RPC_TIMEOUT else timeout
        with _named(worker, self._name):
            answer = ray.get(request, timeout=seconds or None)
        return network.received(pickle.loads(answer))

    def _ask(self, worker: str, function: Callable, args: tuple, kwargs: Any) -> Any:
        import ray

        content = pack.dumps((function, args, kwargs or {}))
        with _named(worker, self._name):
            if worker not in self._actors:
                self._actors[worker] = ray.get_actor(worker)
            return self._actors[worker].call.remote(self._name, content)


@contextmanager
def _named(name: str, caller: str) -> Iterator[None]:
    """Turn Ray's errors of a call to a worker into ours, which name it."""
    from ray import exceptions

    try:
        yield
    except exceptions.RayTaskError as error:
        raise error.cause from None
    except exceptions.ActorUnavailableError as error:  # its process may still be there
        raise WorkerLost(name, "can't be reached", str(error)) from None
    except exceptions.RayActorError as error:
        raise WorkerLost(name, "died", str(error)) from None
    except exceptions.GetTimeoutError:
        reason = f"did not answer a call that {caller} made"
        raise WorkerSilent(name, reason) from None


_kept: list[dist.TCPStore] = []  # by the run's first worker


def _open_store(first: str) -> dist.Store:
    """A store that the run's first worker keeps."""
    here = network.current()
    if here.own_name() == first:
        _keep_store()
        return _kept[0]
    return dist.TCPStore(*here.call(first, _keep_store))


def _keep_store() -> tuple[str, int]:
    """Runs on the first worker: the address of the store, which is made once."""
    import ray

    if not _kept:
        host = ray.util.get_node_ip_address()
        _kept.append(dist.TCPStore(host, 0, is_master=True, wait_for_workers=False))
    return _kept[0].host, _kept[0].port
