"""The engine of Ray: the same workers as actors, on this host or on a cluster."""

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil

from cdopt_tutorial.engines import forking
from cdopt_tutorial.engines.errors import WorkerLost
from cdopt_tutorial.engines.on_actors import OnActors, Plan
from cdopt_tutorial.engines.reference import Ref
from cdopt_tutorial.own_network import VARIABLE

# What Ray would do besides: ask no caller, tell its makers, listen on all devices.
QUIET = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
RUN = "CDOPT_TUTORIAL_RUN"  # all that a driver starts finds its run's folder there
PATIENCE = 60.0  # seconds for a worker to begin anew
PAUSE = 0.2  # seconds between two looks whether it has


@dataclass(frozen=True)
class OnRay(OnActors):
    """Runs a system on actors of Ray; a ValueError if Ray is not installed."""

    title: ClassVar[str] = "Ray"
    name: ClassVar[str] = "ray"
    package: ClassVar[str] = "ray"
    replaces: ClassVar[bool] = True
    #: of a cluster, "host:port", or "auto" for that of this host; None starts one
    address: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.address and not re.fullmatch(r"auto|[^:]+:\d{1,5}", self.address):
            allowed = "host:port, or auto for that of this host"
            raise ValueError(f"address is {self.address!r}, but must be {allowed}")

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

    def _driver(self) -> tuple[Callable[[Plan], dict[str, Any]], str | None]:
        return _drive, self.address

    def _end(self, folder: str) -> None:
        # Ray's agents wait a minute for a server that has gone, to tell it of that.
        mine = lambda each: (each.info["environ"] or {}).get(RUN) == folder  # noqa: E731
        while found := list(filter(mine, psutil.process_iter(["environ"]))):
            for each in found:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(found, PAUSE)

    def _outside(self) -> AbstractContextManager[None]:
        return nullcontext() if self.address is None else _in_host_network()


def _drive(plan: Plan) -> dict[str, Any]:
    """The driver's role: what the roles returned, by name."""
    if plan.address is None:
        os.environ |= QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ[RUN] = plan.settings.folder
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
