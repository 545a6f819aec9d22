"""The error that a run of workers raises, and what a caller gets of a callee's."""

import pickle
import re
import traceback
from contextlib import suppress

import torch.distributed as dist

# How torch marks an exception that crosses workers: where it was raised, and its class.
_MARK = re.compile(r"On WorkerInfo\(id=\d+, name=([^)]+)\):(?:\\n|\s)*(\w*)")
# Texts by which torch says that the other end is gone, or that it does not answer.
_LOST = ("eof", "ECONNRESET", "EPIPE", "connection", "Connection", "shut down")
_SILENT = ("more than set timeout", "Timed out waiting", "Application timeout")


class WorkerError(RuntimeError):
    """A worker failed, and its run was ended; see ``launch``.

    ``worker`` failed first, and ``reason`` says how, such as "was killed by SIGKILL";
    ``details`` is its traceback, or the end of its log.
    """

    def __init__(self, worker: str, reason: str, details: str = ""):
        super().__init__(worker, reason, details)  # with which it is unpickled
        self.worker, self.reason, self.details = worker, reason, details.strip()

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (self.headline, self.details)))

    @property
    def headline(self) -> str:
        """The error in one line."""
        return f"{self.worker} {self.reason}"


class WorkerLost(WorkerError):
    """A worker's process is gone; started again, the run may go on."""


class WorkerSilent(WorkerError):
    """A worker has not answered in time; it may itself wait for another one."""


def portable(error: BaseException, worker: str, caller: str) -> Exception:
    """A callee's exception as its caller gets it, with the callee's traceback.

    It is a WorkerError if it can't be sent, or would end the caller's thread.
    """
    if isinstance(error, WorkerError):
        return error
    if not hasattr(error, "raised_on"):  # else it comes from a worker further away
        text = "".join(traceback.format_exception(error))
        error.add_note(f"\nOn {worker}:\n{text}")
        vars(error)["raised_on"] = worker
    with suppress(Exception):  # a class that does not pickle, or needs other arguments
        sent = pickle.loads(pickle.dumps(error))
        if isinstance(error, Exception) and isinstance(sent, Exception):
            return error
    reason = f"raised {type(error).__name__} in a call that {caller} made"
    return WorkerError(vars(error)["raised_on"], reason, _text(error))


def unanswered(error: RuntimeError, worker: str, caller: str) -> RuntimeError:
    """Torch's error of a call without an answer, as one that names the callee."""
    if _says(error, _SILENT):
        reason = f"did not answer a call that {caller} made"
        return WorkerSilent(worker, reason, str(error))
    if "serializePyObject" in str(error):  # of torch's C++, on the callee
        vars(error)["raised_on"] = worker
    return error


def describe(name: str, error: BaseException) -> WorkerError:
    """The exception that ended a role: who raised it, what, and the traceback."""
    if isinstance(error, WorkerError):
        return error
    kind, text = type(error).__name__, _text(error)
    worker = getattr(error, "raised_on", name)
    if marks := list(_MARK.finditer(text)):  # one for each worker that it crossed
        worker, kind = marks[-1].groups()  # the deepest
    made = WorkerSilent if _says(error, _SILENT) else WorkerError
    if worker != name:
        return made(worker, f"raised {kind} in a call that {name} made", text)
    if isinstance(error, SystemExit):
        code = error.code or 0
        if not isinstance(code, int):  # a text, which Python prints
            code, text = 1, f"{code}\n{text}"
        return WorkerError(name, f"exited with code {code:d} before it finished", text)
    return made(name, f"raised {kind}", text)


def has_lost_peer(error: BaseException) -> bool:
    """Whether it only says that another worker is gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True  # the store is gone, in which groups form
    if hasattr(error, "raised_on") or not _says(error, _LOST):
        return False
    return not _says(error, _SILENT) and not _MARK.search(str(error))


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Whether it is an error of torch's C++ with one of these texts."""
    if not isinstance(error, RuntimeError) or isinstance(error, WorkerError):
        return False
    with suppress(Exception):  # of a class whose text can't be made
        return any(text in str(error) for text in texts)
    return False


def _text(error: BaseException) -> str:
    # Formatting can't fail, whatever its own ``__str__`` does; and what torch sends of
    # a remote one may be the ``repr`` of its text.
    text = "".join(traceback.format_exception(error))
    return re.sub(r"(?<!\\)\\n", "\n", text) if "On WorkerInfo" in text else text
