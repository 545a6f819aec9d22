"""Temporary folders, all in one, which is removed when their process ends.

If the process is killed, its fork server removes it; if that is gone, too, the next
process that makes such a folder does.
"""

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "cdopt_tutorial-"
VARIABLE = "CDOPT_TUTORIAL_SCRATCH"  # names what a fork server removes at its end

_making = threading.Lock()  # or two threads would make this process's folder twice


@contextmanager
def scratch() -> Iterator[str]:
    """A new folder that only this user can read, removed on exit.

    OSError if none can be made.
    """
    with _making:
        place = of_process(os.getpid())
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        yield folder


@functools.cache
def of_process(pid: int) -> str:
    """The folder that holds all others of this process.

    It is locked as long as the process lives; one without a lock is nobody's any more.
    """
    _sweep()
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        with suppress(OSError):  # another process sweeps it before it is locked
            fcntl.flock(_open(folder), fcntl.LOCK_EX)
        if os.path.isdir(folder):
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder


def remove_all() -> None:
    """Remove the folders of this process, which is about to end."""
    shutil.rmtree(of_process(os.getpid()), ignore_errors=True)


def _sweep() -> None:
    """Remove this user's folders of processes that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            lock = _open(folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _open(folder: str | Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
