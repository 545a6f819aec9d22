"""Start a system of named roles, each in a fresh process, and return their results."""

import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cdopt_tutorial import scratch, torchrun
from cdopt_tutorial.calls.network import LONGEST
from cdopt_tutorial.checks import check
from cdopt_tutorial.probes.trace import Trace
from cdopt_tutorial.probes.wire import Wire
from cdopt_tutorial.run import on_ray, pack, under_torchrun
from cdopt_tutorial.run.group import Group
from cdopt_tutorial.run.worker import Role, Settings

# Seconds for all to join: on two cores, at a load of 20, Ray's took more than 60.
JOIN = 120.0
# Seconds for a call: twice torch's own, since it may be an episode, or a step for which
# others wait.
PATIENCE = 120.0
_LIMITS = [getattr(resource, k) for k in dir(resource) if k.startswith("RLIMIT_")]


def launch(
    roles: Mapping[str, Role],
    *,
    on: str = "rpc",
    deadline: float = 600.0,
    join_deadline: float = JOIN,
    rpc_timeout: float = PATIENCE,
    rpc_threads: int = 4,
    polling: bool = False,
    attach: Callable[[], None] | None = None,
    on_report: Callable[[str, Any], None] | None = None,
    trace: Trace | None = None,
    wire: Wire | None = None,
) -> dict[str, Any]:
    """Run a system of roles and return what each of them returned, by name.

    Each role gets a fresh process, which joins an RPC group under the role's name;
    ranks follow the order of ``roles``. What a worker prints is printed here, under
    its name. Workers import modules afresh. What a role needs of the notebook or
    script itself is sent by value, to all, so they can call each other with it.

    Under torchrun this process itself plays the role of its rank; the results are
    those of all. On Ray each role is an actor's.

    On this host workers have a network to themselves. Set the variable
    CDOPT_TUTORIAL_NETWORK to "host" if a role needs the machine's. Where the kernel
    refuses a network, a warning says so once.

    Args:
        roles: the workers' names and roles.
        on: what carries calls: "rpc", or "ray" on this host, or "ray:HOST:PORT" or
            "ray:auto" for a cluster, where threads and polling have no effect.
        deadline: seconds that the whole run may take.
        join_deadline: seconds until all workers must have joined.
        rpc_timeout: seconds until an unanswered call fails, and a collective of a
            process group; 0 means never.
        rpc_threads: threads with which each worker answers calls. Few answer
            faster, but a call that waits for another one holds its thread.
        polling: whether idle workers poll shared memory, and so answer calls sooner,
            but take time on cores that others compute on. Else they wait at sockets.
        attach: called first in every worker, see :mod:`~.attach`.
        on_report: called as ``on_report(worker, record)`` for each record that a
            role sends by :func:`~.worker.report`.
        trace: filled with every call by torch RPC.
        wire: filled with the bytes of the run, for which the workers must not poll.

    ValueError, before any process starts: a role can't be sent, or an argument is out
    of range; OSError if this process may not open as many files as the workers need, or
    its folder is gone.
    WorkerError, once all have been ended: one of them raised, died, exited early, was
    stopped, did not join, or kept the others waiting.
    """
    folder = os.readlink("/proc/self/cwd")
    if not os.path.isdir(folder):
        gone = folder.removesuffix(" (deleted)")
        raise FileNotFoundError(f"the working folder is gone: {gone}")
    settings = Settings(
        world_size=len(roles),
        deadline=deadline,
        join_deadline=join_deadline,
        rpc_timeout=rpc_timeout,
        rpc_threads=rpc_threads,
        polling=polling,
        traced=trace is not None,
        counted=wire is not None,
        path=[entry or folder for entry in sys.path],
        environment=dict(os.environ),
        affinity=os.sched_getaffinity(0),
        limits={kind: resource.getrlimit(kind) for kind in _LIMITS},
    )
    _check(settings, roles)
    address = on_ray.check(on, trace, wire) if on != "rpc" else None
    packed, modules = pack.pack({name: (attach, roles[name]) for name in roles})
    with tempfile.TemporaryDirectory(
        dir=scratch.folder(), ignore_cleanup_errors=True
    ) as folder:
        settings = replace(settings, folder=folder, modules=modules)
        if on != "rpc":
            done = on_ray.play(address, settings, packed, on_report)
        elif torchrun.is_here():
            done = under_torchrun.play(settings, roles, attach, on_report)
        else:
            _check_open_files(len(packed), polling)
            done = Group(settings, packed, on_report).run()
    if trace is not None:
        trace.fill([record for _, record, _ in done.values()])
    if wire is not None:
        wire.received = {name: received for name, (_, _, received) in done.items()}
    return {
        name: pack.loads(name, "returned", result)
        for name, (result, _, _) in done.items()
    }


def _check(settings: Settings, roles: Mapping[str, Role]) -> None:
    if not roles:
        raise ValueError("no roles: a run needs at least one worker")
    for name, role in roles.items():
        if not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", str(name)):
            allowed = "up to 127 letters, digits, -, _ and :"
            raise ValueError(f"{name!r} can't name a worker: use {allowed}")
        check(role, "num_threads", role.num_threads > 0, "above 0")
    for name in "deadline", "join_deadline":
        check(settings, name, getattr(settings, name) > 0, "above 0")
    fits = settings.rpc_threads in range(1, 257)
    check(settings, "rpc_threads", fits, "a whole number from 1 to 256")
    fits = 0 <= settings.rpc_timeout <= LONGEST
    check(settings, "rpc_timeout", fits, f"from 0, for never, to {LONGEST:g}")
    fits = not (settings.polling and settings.counted)
    check(settings, "polling", fits, "False where bytes are counted")


def _check_open_files(workers: int, polling: bool) -> None:
    """OSError where torch's C++ would end the process and hardly say why."""
    needed = 96 + 64 * workers if polling else 32 + 8 * workers
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < needed:
        need = f"{workers} workers need {needed} open files each"
        raise OSError(f"{need}, but {most} are allowed here: ulimit -n {needed}")
