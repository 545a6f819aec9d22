"""A temporary folder for one run; a later run removes it if this one could not."""

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "cdopt-tutorial-"

_mine: set[str] = set()  # in use by this process


@contextmanager
def scratch() -> Iterator[str]:
    """A new folder that only this user can read, with all that is in it for a time.

    It is locked while it is in use. So a folder without a lock is that of a process
    that was killed, and is removed here first. OSError if none can be made.
    """
    _sweep()
    folder, lock = _locked_folder()
    _mine.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        _mine.remove(folder)


@functools.cache
def of_process(pid: int) -> str:
    """Such a folder for as long as this process, whose number it is, lives.

    Its path is short, as that of a socket must be, and holds in this process alone.
    """
    folder, lock = _locked_folder()
    _mine.add(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return f"/proc/self/fd/{lock}"


def remove_all() -> None:
    """Remove the folders of this process, which is about to end."""
    for folder in list(_mine):
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder() -> tuple[str, int]:
    """A folder's path, and the descriptor that holds its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # swept before it was opened
        with suppress(OSError):  # a file system without locks: then nobody sweeps it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder, lock
        os.close(lock)  # swept before it was locked


def _sweep() -> None:
    """Remove the folders of processes that are no more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or being removed by somebody else
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
