"""The one error that a run of workers raises, and how a remote exception is read."""

import re
from typing import NamedTuple

# How torch marks, in an exception that crosses a worker, where it was and what it was.
_MARK = re.compile(r"On WorkerInfo\(id=\d+, name=([^)]+)\):(?:\\n|\s)*(\w*)")


class WorkerError(RuntimeError):
    """A worker failed, and the run that it belonged to was ended.

    Raised by :func:`~cdopt_tutorial.engines.launch.launch`, in the parent.

    Attributes:
        worker: name of the worker that failed first.
        reason: what happened to it, for instance ``"was killed by SIGKILL"``.
        details: the worker's traceback, or the last that it printed; may be empty.
    """

    def __init__(self, worker: str, reason: str, details: str = ""):
        self.worker, self.reason, self.details = worker, reason, details.strip()
        super().__init__(
            "\n\n".join(filter(None, (f"{worker} {reason}", self.details)))
        )

    @property
    def headline(self) -> str:
        """The error in one line."""
        return f"{self.worker} {self.reason}"

    def __reduce__(self):
        return type(self), (self.worker, self.reason, self.details)


class Origin(NamedTuple):
    """Where an exception that came back from a call was raised."""

    worker: str
    kind: str  # name of the exception's class
    traceback: str  # the remote one


def origin(message: str) -> Origin | None:
    """Find the worker that raised an exception, from the text that torch made of it.

    An exception that crosses several workers is marked by each; the last mark is
    the deepest. Some exceptions arrive as the ``repr`` of their text.

    Args:
        message: text of the exception, as it arrived at the caller.

    Returns:
        None if the exception did not come from another worker.
    """
    marks = list(_MARK.finditer(message))
    if not marks:
        return None
    worker, kind = marks[-1].groups()
    remote = message[marks[-1].start() :].split("\n\nAt:\n")[0]
    if "\n" not in remote:  # a repr
        remote = remote.replace("\\n", "\n").replace("\\'", "'").replace('\\"', '"')
    return Origin(worker, kind, remote)
