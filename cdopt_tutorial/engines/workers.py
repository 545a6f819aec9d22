"""What the engines of workers share: objects on them, by whatever network."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from cdopt_tutorial.engines.launcher import process
from cdopt_tutorial.engines.launcher.launch import Role, launch
from cdopt_tutorial.engines.seam import gradients, network
from cdopt_tutorial.engines.seam.reference import Ref


@dataclass(frozen=True)
class Workers:
    """Runs a system on workers, and travels to them with the roles."""

    way: str = "distributed"  #: of a gradient: distributed autograd, or a "cut"
    #: whether one starts anew where it died, if its role is replaceable
    replaces: ClassVar[bool] = False

    def __post_init__(self):
        if self.way not in gradients.WAYS:
            allowed = " or ".join(gradients.WAYS)
            raise ValueError(f"way is {self.way!r}, but must be {allowed}")

    def launch(self, roles: Mapping[str, Role], **options: Any) -> dict[str, Any]:
        """What each role returned, by name; as :func:`.launch`, with its options."""
        return launch(roles, **options)

    def remote(self, worker: str, make: Callable, *args: Any, name: str = "") -> Ref:
        """Make an object on a worker; the same for everyone who asks by one name."""
        return network.current().call(worker, _make, (name, make, *args))

    def reference(self, value: Any) -> Ref:
        """A reference to an object of this worker."""
        return Ref.to(value)

    def context(self) -> AbstractContextManager[gradients.Context]:
        """One step's context."""
        return gradients.context(self.way)

    def report(self, worker: str, record: Any) -> None:
        """Tell the parent what this worker has to tell."""
        process.report(record)


def _make(name: str, make: Callable, *args: Any) -> Ref:
    return Ref.named(name, make, *args) if name else Ref.to(make(*args))
