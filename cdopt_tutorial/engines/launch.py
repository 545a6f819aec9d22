"""Start a system of named roles, each in a fresh process, and return their results."""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cdopt_tutorial.engines import pack, process
from cdopt_tutorial.engines.device import DeviceMaps, check_device_maps
from cdopt_tutorial.engines.group import Group
from cdopt_tutorial.engines.trace import Trace
from cdopt_tutorial.engines.wire import Wire


@dataclass(frozen=True)
class Role:
    """What one worker does: a function that it can import, and its arguments.

    Attributes:
        function: defined at the top level of a module, not in a notebook.
        args: its positional arguments; they are pickled.
        kwargs: its keyword arguments; they are pickled.
        deadline: seconds after the start by which the function must have returned.
            None by default: then only the deadline of the whole run holds.
        num_threads: threads of torch's operators in this worker.
        device_maps: by the name of another worker, which of its devices stands for
            which of this one's, such as ``{"ps": {"cuda:0": "cuda:1"}}``: what a call
            carries from the one arrives on the other, and the answer comes back the
            same way. Without a map calls carry tensors of the CPU only.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    num_threads: int = 1
    device_maps: DeviceMaps = field(default_factory=dict)


def launch(
    roles: Mapping[str, Role],
    *,
    deadline: float = 600.0,
    join_deadline: float = 60.0,
    rpc_timeout: float = 60.0,
    rpc_threads: int = 4,
    polling: bool = True,
    attach: Callable[[], None] | None = None,
    on_report: Callable[[str, Any], None] | None = None,
    trace: Trace | None = None,
    wire: Wire | None = None,
) -> dict[str, Any]:
    """Run a system of roles and return what each of them returned.

    Called by the parent: a notebook, a test, the command line. Each role gets a
    fresh process, which joins an RPC group under the role's name; ranks follow the
    order of ``roles``. The workers meet by a file in a directory of this run, and
    listen on the loopback device only. What a worker prints is printed here, under
    its name.

    Args:
        roles: the workers' names and roles.
        deadline: seconds that the whole run may take.
        join_deadline: seconds until all workers must have joined.
        rpc_timeout: seconds until an unanswered call fails; 0 means never.
        rpc_threads: threads with which each worker answers calls. Few answer
            faster, but a call that waits for another one holds its thread.
        polling: whether idle workers poll shared memory for messages. Calls are
            then answered sooner, but every idle worker takes time from those
            that compute, where there are more workers than cores.
        attach: called in every worker before its role begins: what wraps the system's
            functions from outside, see :mod:`~cdopt_tutorial.engines.attach`.
        on_report: called as ``on_report(worker, record)`` for each record that a
            role sends by :func:`~cdopt_tutorial.engines.process.report`.
        trace: filled with every call of the run; None records nothing.
        wire: filled with the bytes of the run, for which the workers must not poll
            nor have device maps: what they pass then passes no socket. None counts
            nothing.

    Returns:
        What each role's function returned, by name.

    Raises:
        ValueError: a role can't be sent to a worker, or an argument is out of
            range; raised before any process starts.
        WorkerError: a worker raised, died, exited early, was stopped, did not join,
            or missed its deadline. All others have been ended by then.
    """
    _check_roles(roles)
    _check_positive(
        deadline=deadline,
        join_deadline=join_deadline,
        rpc_threads=rpc_threads,
    )
    if rpc_timeout < 0:
        raise ValueError(f"rpc_timeout is {rpc_timeout}, but must be at least 0")
    if polling and wire is not None:
        raise ValueError("polling is True, but must be False where bytes are counted")
    device_maps = _device_maps(roles)
    if any(device_maps.values()) and wire is not None:
        raise ValueError("there are device maps, but bytes can't be counted with them")
    packed, modules = _packed(roles)
    with _private_folder() as folder:
        settings = process.Settings(
            world_size=len(roles),
            folder=folder,
            rpc_timeout=rpc_timeout,
            rpc_threads=rpc_threads,
            polling=polling,
            device_maps=device_maps,
            modules=modules,
            attach=attach,
            traced=trace is not None,
            counted=wire is not None,
        )
        with Group(settings, packed, roles, on_report) as group:
            results, halves, received = group.wait(deadline, join_deadline)
    if trace is not None:
        trace.fill(halves)
    if wire is not None:
        wire.fill(received)
    return results


def _packed(roles: Mapping[str, Role]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The roles as they travel, and the modules that any of them needs."""
    packed, modules = {}, set()
    for name, role in roles.items():
        content = role.function, role.args, dict(role.kwargs)
        packed[name], needed = pack.pack(name, content)
        modules |= needed
    return packed, tuple(sorted(modules))


def _device_maps(roles: Mapping[str, Role]) -> dict[str, DeviceMaps]:
    """Each worker's maps, checked, in types that can be sent to it."""
    device_maps = {
        name: {peer: dict(devices) for peer, devices in role.device_maps.items()}
        for name, role in roles.items()
    }
    check_device_maps(device_maps)
    return device_maps


def _check_roles(roles: Mapping[str, Role]) -> None:
    if not roles:
        raise ValueError("no roles: a run needs at least one worker")
    for name in roles:
        if not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", str(name)):
            raise ValueError(
                f"{name!r} can't name a worker: "
                "use up to 127 letters, digits, -, _ and :"
            )
        _check_positive(num_threads=roles[name].num_threads)


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}, but must be above 0")


@contextmanager
def _private_folder() -> Iterator[str]:
    """A directory for one run, which only this user can read."""
    folder = tempfile.mkdtemp(prefix="cdopt-tutorial-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
