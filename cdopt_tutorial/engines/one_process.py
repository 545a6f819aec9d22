"""The engine of one process: every object is here, and every call is a plain one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cdopt_tutorial.engines.seam.reference import LocalRef


class OneProcess:
    """Runs a system in this process, which reports to nobody."""

    def __init__(self):
        self._named: dict[str, LocalRef] = {}

    def remote(
        self, worker: str, make: Callable, *args: Any, name: str = ""
    ) -> LocalRef:
        """Make an object here; a name always gives the same object."""
        if not name:
            return LocalRef(make(*args))
        if name not in self._named:
            self._named[name] = LocalRef(make(*args))
        return self._named[name]

    def reference(self, value: Any) -> LocalRef:
        """A reference to an object of this process."""
        return LocalRef(value)

    def context(self) -> AbstractContextManager[None]:
        """One step's context: plain autograd needs none."""
        return nullcontext()

    def report(self, record: Any) -> None:
        """Nothing: the caller gets the result at the end."""
