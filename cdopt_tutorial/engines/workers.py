"""What the engines with workers share: objects on them, over whatever network."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from cdopt_tutorial.engines.launcher import process
from cdopt_tutorial.engines.launcher.launch import Role, launch
from cdopt_tutorial.engines.seam import gradients, network
from cdopt_tutorial.engines.seam.reference import Ref


@dataclass(frozen=True)
class Workers:
    """Runs a system on workers; it is sent to them with their roles."""

    way: str = "distributed"  #: of a gradient: distributed autograd, or a "cut"

    def __post_init__(self):
        if self.way not in gradients.WAYS:
            allowed = " or ".join(gradients.WAYS)
            raise ValueError(f"way is {self.way!r}, but must be {allowed}")

    def launch(self, roles: Mapping[str, Role], **options: Any) -> dict[str, Any]:
        """Start the roles by :func:`.launch`; return what each returned, by name."""
        return launch(roles, **options)

    def remote(self, worker: str, make: Callable, *args: Any, name: str = "") -> Ref:
        """Make an object on a worker; a name always gives the same object."""
        return network.current().call(worker, Ref.named, (name, make, *args))

    def reference(self, value: Any) -> Ref:
        """A reference to an object of this worker."""
        return Ref.to(value)

    def context(self) -> AbstractContextManager[gradients.Context]:
        """One step's context."""
        return gradients.context(self.way)

    def report(self, record: Any) -> None:
        """Send the parent a record."""
        process.report(record)
