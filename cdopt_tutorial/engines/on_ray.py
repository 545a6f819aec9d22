"""The engine of Ray: workers as actors, on this host or on a cluster."""

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from cdopt_tutorial.engines.actors.actor import Actors, WorkerPlan
from cdopt_tutorial.engines.actors.driver import OnActors
from cdopt_tutorial.engines.launcher import forking
from cdopt_tutorial.engines.launcher.launch import Role
from cdopt_tutorial.own_network import VARIABLE

# By default Ray serves any caller, reports to its makers, and listens on all devices.
QUIET = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@dataclass(frozen=True)
class OnRay(OnActors):
    """Runs a system on actors of Ray; a ValueError if Ray is not installed."""

    name: ClassVar[str] = "ray"
    #: of a cluster: "host:port", or "auto" for that of this host; None starts one
    address: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.address and not re.fullmatch(r"auto|[^:]+:\d{1,5}", self.address):
            allowed = "host:port, or auto for that of this host"
            raise ValueError(f"address is {self.address!r}, but must be {allowed}")

    @property
    def many_hosts(self) -> bool:
        return self.address is not None

    def launch(self, roles: Mapping[str, Role], **options: Any) -> dict[str, Any]:
        with _in_host_network() if self.many_hosts else nullcontext():
            return super().launch(roles, **options)

    def actors(self, plans: Sequence[WorkerPlan]) -> AbstractContextManager[Actors]:
        if self.address is None:
            os.environ |= QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Not before: Ray reads the environment as it is imported.
        from cdopt_tutorial.engines.actors import ray_worker

        return ray_worker.actors(plans, self.address)


@contextmanager
def _in_host_network() -> Iterator[None]:
    """Let the driver reach a cluster, which it can't in a network of its own."""
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
