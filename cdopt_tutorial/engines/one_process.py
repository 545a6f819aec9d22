"""The engine of one process: every object is here, every call is a plain call."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from cdopt_tutorial.engines.seam.reference import LocalRef


class OneProcess:
    """Runs a system in this process, where nobody is told how far it has come."""

    replaces: ClassVar[bool] = False  # there is nobody to lose

    def __init__(self):
        self._named: dict[str, LocalRef] = {}

    def remote(
        self, worker: str, make: Callable, *args: Any, name: str = ""
    ) -> LocalRef:
        """Make an object here; the same object for everyone who asks by one name."""
        if name in self._named:
            return self._named[name]
        made = LocalRef(make(*args))
        return self._named.setdefault(name, made) if name else made

    def reference(self, value: Any) -> LocalRef:
        """A reference to an object of this process."""
        return LocalRef(value)

    def context(self) -> AbstractContextManager[None]:
        """One step's context: plain autograd needs none."""
        return nullcontext()

    def report(self, worker: str, record: Any) -> None:
        """Tell nobody: the caller waits for the end."""
