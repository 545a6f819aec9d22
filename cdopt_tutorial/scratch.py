"""Temporary folders, all in one, which is removed when their process ends."""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "cdopt_tutorial-"
VARIABLE = "CDOPT_TUTORIAL_SCRATCH"  # tells a fork server what to remove at its end


@contextmanager
def scratch() -> Iterator[str]:
    """A new folder that only this user can read, with all that is in it for a time.

    OSError if none can be made.
    """
    place = of_process(os.getpid())
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        yield folder


@functools.cache
def of_process(pid: int) -> str:
    """The folder that holds all the others of this process, whose number it is."""
    folder = tempfile.mkdtemp(prefix=PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_all() -> None:
    """Remove the folders of this process, which is about to end."""
    shutil.rmtree(of_process(os.getpid()), ignore_errors=True)
