"""The engine of Monarch, PyTorch's own actors, which are beta: on this host only."""

import os
import pwd
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cdopt_tutorial.engines.actors.actor import Actors, WorkerPlan
from cdopt_tutorial.engines.actors.driver import OnActors
from cdopt_tutorial.engines.watch.errors import WorkerError

LOGS = Path("/tmp")  # Monarch can't be told another place


@dataclass(frozen=True)
class OnMonarch(OnActors):
    """Runs a system on actors of Monarch; a ValueError if it is not installed.

    A worker that dies ends the run, which names it within half a minute. Monarch leaves
    a log in a folder of /tmp with the user's name; a folder of another user's is
    refused.
    """

    name: ClassVar[str] = "monarch"

    def actors(self, plans: Sequence[WorkerPlan]) -> AbstractContextManager[Actors]:
        # Its sockets lie in folders that anybody may enter, but nobody enters this one.
        os.environ["TMPDIR"] = plans[0].settings.folder
        with suppress(KeyError):  # of a user without a name
            claim(LOGS / pwd.getpwuid(os.getuid()).pw_name)
        # Not at the top: it is an extra, and starts threads as it is imported.
        from cdopt_tutorial.engines.actors import monarch_worker

        return monarch_worker.actors(plans)


def claim(folder: Path) -> None:
    """Make a folder, or close it, so that nobody else can read or write in it.

    A WorkerError if it is another user's, who could make us write anywhere.
    """
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        reason = f"would keep its log in {folder}, which is not this user's folder"
        raise WorkerError(OnMonarch.name, reason)
    folder.chmod(0o700)
