"""The one error that a run of workers raises, and how a remote exception is read."""

import re

# How torch marks an exception that crosses workers: where it was raised, and its class.
_MARK = re.compile(r"On WorkerInfo\(id=\d+, name=([^)]+)\):(?:\\n|\s)*(\w*)")


class WorkerError(RuntimeError):
    """A worker failed, and its run was ended; see ``launch``.

    ``worker`` failed first, and ``reason`` says how, such as "was killed by SIGKILL";
    ``details`` is its traceback, or the end of its log.
    """

    def __init__(self, worker: str, reason: str, details: str = ""):
        self.worker, self.reason, self.details = worker, reason, details.strip()
        super().__init__("\n\n".join(filter(None, (self.headline, self.details))))

    @property
    def headline(self) -> str:
        """The error in one line."""
        return f"{self.worker} {self.reason}"

    def __reduce__(self):
        return type(self), (self.worker, self.reason, self.details)


class WorkerLost(WorkerError):
    """A worker's process is gone; a run with a checkpoint may start anew."""


def origin(message: str) -> tuple[str, str, str] | None:
    """Worker, class and remote traceback of an exception; None if it is our own."""
    marks = list(_MARK.finditer(message))  # one for each worker that it crossed
    if not marks:
        return None
    worker, kind = marks[-1].groups()  # the deepest
    remote = message[marks[-1].start() :].split("\n\nAt:\n")[0]
    if "\n" not in remote:  # some arrive as the ``repr`` of their text
        remote = remote.replace("\\n", "\n").replace("\\'", "'").replace('\\"', '"')
    return worker, kind, remote
