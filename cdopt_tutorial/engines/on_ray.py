"""The engine of Ray: the same workers as actors, on this host or on a cluster."""

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from cdopt_tutorial import torchrun
from cdopt_tutorial.engines import forking, pack
from cdopt_tutorial.engines.errors import WorkerLost
from cdopt_tutorial.engines.group import Group, show_line
from cdopt_tutorial.engines.launch import Role, launch
from cdopt_tutorial.engines.process import Settings
from cdopt_tutorial.engines.reference import Ref
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.own_network import VARIABLE

# What Ray would do besides: ask no caller, tell its makers, listen on all devices.
QUIET = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
PATIENCE = 60.0  # seconds for a worker to begin anew
ALONE = 30.0  # seconds that a worker goes on without a word from who watches it
PAUSE = 0.2  # seconds between two looks whether it has
DRIVER = "ray"  # the name of the process that starts and watches the actors


@dataclass(frozen=True)
class Plan:
    """What the driver is to do."""

    settings: Settings  #: of the run
    packed: Mapping[str, bytes]  #: the workers' roles, by name
    address: str | None  #: of a cluster that is there; None starts one here
    join_deadline: float  #: seconds until all actors must have been made


@dataclass(frozen=True)
class OnRay(Workers):
    """Runs a system on actors of Ray; a ValueError if Ray is not installed."""

    way: str = "cut"
    replaces: ClassVar[bool] = True
    #: of a cluster, "host:port", or "auto" for that of this host; None starts one
    address: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.way != "cut":
            raise ValueError(f"way is {self.way!r}, but must be cut: Ray has no other")
        if find_spec("ray") is None:
            install = "pip install 'cdopt-tutorial[ray]'"
            raise ValueError(f"the engine ray needs Ray, which is not here: {install}")
        if self.address and not re.fullmatch(r"auto|[^:]+:\d{1,5}", self.address):
            allowed = "host:port, or auto for that of this host"
            raise ValueError(f"address is {self.address!r}, but must be {allowed}")
        if torchrun.is_here():
            raise ValueError("the engine ray starts its workers itself, not torchrun")

    def remote(self, worker: str, make: Callable, *args: Any, name: str = "") -> Ref:
        """The same, on a worker that may be about to begin anew."""
        limit = time.monotonic() + PATIENCE
        while True:
            try:
                return super().remote(worker, make, *args, name=name)
            except WorkerLost:
                if time.monotonic() > limit:
                    raise
                time.sleep(PAUSE)

    def launch(self, roles: Mapping[str, Role], **options: Any) -> dict[str, Any]:
        """What each role returned, by name; as :func:`.launch`, with its options.

        What is of torch RPC has no meaning here: threads, polling; a trace or a wire
        is refused. Roles that are replaceable begin anew where their actor dies.
        """
        for name in ("trace", "wire"):
            if options.get(name) is not None:
                raise ValueError(f"{name} is for torch RPC, and not for the engine ray")
        return launch(roles, play=self._play, **options)

    def _play(
        self,
        settings: Settings,
        packed: Mapping[str, bytes],
        on_report: Callable[[str, Any], None] | None,
        deadlines: tuple[float, float],
    ) -> dict[str, tuple[Any, None, None]]:
        def hand_on(_: str, told: tuple) -> None:
            worker, kind, *content = told
            if kind == "output":
                show_line(worker, *content)
            elif on_report is not None:
                on_report(worker, *content)

        plan = Plan(settings, packed, self.address, deadlines[1])
        content, modules = pack.pack({DRIVER: (None, Role(_drive, (plan,)))})
        alone = replace(settings, world_size=1, modules=modules)
        with nullcontext() if self.address is None else _in_host_network():
            done = Group(alone, content, hand_on).run(*deadlines)
        results, _, _ = done[DRIVER]
        return {name: (result, None, None) for name, result in results.items()}


def _drive(plan: Plan) -> dict[str, Any]:
    """The driver's role: what the roles returned, by name."""
    if plan.address is None:
        os.environ |= QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # What Ray says is for who looks into a failure, and in the log.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w")
    # Not before: Ray reads the environment as it is imported.
    from cdopt_tutorial.engines.ray_driver import drive

    return drive(plan)


@contextmanager
def _in_host_network() -> Iterator[None]:
    """The driver of a cluster must reach it: in a run's own network there is nobody."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "host"
    forking.end_server()
    try:
        yield
    finally:
        forking.end_server()
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
