"""The engine of Monarch, PyTorch's own actors, which is beta: on this host only."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from cdopt_tutorial.engines.on_actors import OnActors, Plan


@dataclass(frozen=True)
class OnMonarch(OnActors):
    """Runs a system on actors of Monarch; a ValueError if it is not installed.

    A worker that dies ends the run, which names it within half a minute. Monarch keeps
    a log of its own in /tmp, in a folder with the user's name, which stays there.
    """

    title: ClassVar[str] = "Monarch"
    name: ClassVar[str] = "monarch"
    package: ClassVar[str] = "monarch"

    def _driver(self) -> tuple[Callable[[Plan], dict[str, Any]], None]:
        return _drive, None


def _drive(plan: Plan) -> dict[str, Any]:
    """The driver's role: what the roles returned, by name."""
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w")
    # Its sockets lie in folders that others may enter; nobody else enters this one.
    os.environ["TMPDIR"] = plan.settings.folder
    # Not before: it is an extra, and starts threads as it is imported.
    from cdopt_tutorial.engines.monarch_driver import drive

    return drive(plan)
