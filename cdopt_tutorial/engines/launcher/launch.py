"""Start a system of named roles, each in a fresh process, and return their results."""

import math
import os
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cdopt_tutorial import torchrun
from cdopt_tutorial.engines.launcher import edited, pack
from cdopt_tutorial.engines.launcher.group import Group
from cdopt_tutorial.engines.launcher.process import LOOPBACK, Settings
from cdopt_tutorial.engines.probes.trace import Trace
from cdopt_tutorial.engines.probes.wire import Wire
from cdopt_tutorial.engines.torchrun.peers import Peers
from cdopt_tutorial.engines.torchrun.store import TORCHRUN, interface
from cdopt_tutorial.engines.watch.errors import WorkerError
from cdopt_tutorial.own_network import VARIABLE
from cdopt_tutorial.scratch import scratch

# Seconds for all to join: on two cores, at a load of 20, Ray's took more than 60.
JOIN = 120.0
MOST_THREADS = 256  # that answer a worker's calls


@dataclass(frozen=True)
class Role:
    """What one worker does: a function and its arguments, which are pickled."""

    #: from a module that the worker can import, or from the notebook or script.
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_threads: int = 1  #: threads of torch's operators in this worker


def launch(
    roles: Mapping[str, Role],
    *,
    deadline: float = 600.0,
    join_deadline: float = JOIN,
    rpc_timeout: float = 60.0,
    rpc_threads: int = 4,
    polling: bool = False,
    attach: Callable[[], None] | None = None,
    on_report: Callable[[str, Any], None] | None = None,
    trace: Trace | None = None,
    wire: Wire | None = None,
    play: Callable | None = None,
) -> dict[str, Any]:
    """Run a system of roles and return what each of them returned, by name.

    Each role gets a fresh process, which joins an RPC group under the role's name;
    ranks follow the order of ``roles``. What a worker prints is printed here, under
    its name. Workers import modules afresh. What a role needs of the notebook or
    script itself is sent by value, to all, so they can call each other with it.

    Under torchrun only the role of this process's rank is started here; the results
    are those of all.

    Workers have a network to themselves. Set the variable CDOPT_TUTORIAL_NETWORK to
    "host" before the first run if a role needs the machine's. Where the kernel refuses
    a network, a warning says so once.

    Args:
        roles: the workers' names and roles.
        deadline: seconds that the whole run may take.
        join_deadline: seconds until all workers must have joined.
        rpc_timeout: seconds until an unanswered call fails; 0 means never.
        rpc_threads: threads with which each worker answers calls. Few answer
            faster, but a call that waits for another one holds its thread.
        polling: whether idle workers poll shared memory, and so answer calls sooner,
            but take time on cores that others compute on. Else they wait at sockets.
        attach: called first in every worker, see :mod:`~.attach`.
        on_report: called as ``on_report(worker, record)`` for each record that a
            role sends by :func:`~.process.report`.
        trace: filled with every call through a reference.
        wire: filled with the bytes of the run, for which the workers must not poll.
        play: what an engine starts the workers by, if not by processes of this host.

    ValueError, before any process starts: a role can't be sent, an argument is out of
    range, a module was edited since its import; OSError if this process may not open
    as many files as the workers need. WorkerError, once all have been ended: one of
    them raised, died, exited early, was stopped, did not join, or got no further.
    """
    _check_roles(roles)
    _check("deadline", deadline, deadline > 0, "above 0")
    _check("join_deadline", join_deadline, join_deadline > 0, "above 0")
    allowed = range(1, MOST_THREADS + 1)
    whole = f"a whole number from 1 to {MOST_THREADS}"
    _check("rpc_threads", rpc_threads, rpc_threads in allowed, whole)
    fits = 0 <= rpc_timeout < math.inf
    _check("rpc_timeout", rpc_timeout, fits, "at least 0 and finite: 0 means never")
    fits = not polling or wire is None
    _check("polling", polling, fits, "False where bytes are counted")
    edited.refuse()
    packed, modules = pack.pack({name: (attach, roles[name]) for name in roles})
    play = play or (_play_one_of if torchrun.is_here() else _play_all)
    with scratch() as folder:
        settings = Settings(
            world_size=len(roles),
            folder=folder,
            # A file, so that no port is opened, and nothing stays.
            init_method=f"file://{folder}",
            interface=LOOPBACK,
            rpc_timeout=rpc_timeout,
            rpc_threads=rpc_threads,
            polling=polling,
            modules=modules,
            traced=trace is not None,
            counted=wire is not None,
        )
        done = play(settings, packed, on_report, (deadline, join_deadline))
    if trace is not None:
        trace.fill([record for _, record, _ in done.values()])
    if wire is not None:
        wire.received = {name: received for name, (_, _, received) in done.items()}
    return {name: result for name, (result, _, _) in done.items()}


def _play_all(settings: Settings, packed: Mapping[str, bytes], on_report, deadlines):
    _check_open_files(len(packed), settings.polling)
    return Group(settings, packed, on_report).run(*deadlines)


def _play_one_of(settings: Settings, packed: Mapping[str, bytes], on_report, deadlines):
    """Run the one worker that this process has under torchrun."""
    os.environ[VARIABLE] = "host"  # the others must reach it
    with Peers(list(packed), on_report, deadlines[1]) as others:
        init_method = f"{TORCHRUN}://{others.path}"
        settings = replace(settings, init_method=init_method, interface=interface())
        here = dict.fromkeys(packed) | {others.own: packed[others.own]}
        group = Group(settings, here, others.report, others.look, others.explains_in)
        try:
            return others.exchange(group.run(*deadlines))
        except WorkerError as error:
            others.fail(error)
            raise


def _check_open_files(workers: int, polling: bool) -> None:
    """OSError where torch's C++ would end the process and hardly say why."""
    needed = 96 + 64 * workers if polling else 32 + 8 * workers
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < needed:
        need = f"{workers} workers need {needed} open files each"
        raise OSError(f"{need}, but {most} are allowed here: ulimit -n {needed}")


def _check_roles(roles: Mapping[str, Role]) -> None:
    if not roles:
        raise ValueError("no roles: a run needs at least one worker")
    for name, role in roles.items():
        if not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", str(name)):
            allowed = "up to 127 letters, digits, -, _ and :"
            raise ValueError(f"{name!r} can't name a worker: use {allowed}")
        _check("num_threads", role.num_threads, role.num_threads > 0, "above 0")


def _check(name: str, value: Any, fits: bool, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{name} is {value}, but must be {allowed}")
