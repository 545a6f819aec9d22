"""A folder for all temporary files of this process, which only this user can enter.

It goes with the process or, if that is killed, with its fork server.
"""

import functools
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing import util

import psutil

VARIABLE = "CDOPT_TUTORIAL_SCRATCH"  # names what a fork server removes at its end


@functools.cache
def folder() -> str:
    """The folder; OSError if none can be made."""
    made = tempfile.mkdtemp(prefix="cdopt-")
    # Which multiprocessing's own children run at their ends, too, but no forked ones.
    util.Finalize(None, shutil.rmtree, (made, True), exitpriority=0)
    return made


@functools.cache
def short(folder: str) -> str:
    """A path to a folder, in this process only, that fits into any socket or URL."""
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def end_all(folder: str) -> None:
    """Kill what has its temporary files there, also in sessions of its own."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get("TMPDIR", "").startswith(folder):
                process.kill()


def remove() -> None:
    """Remove it, if this process, which is about to end, has made it."""
    if folder.cache_info().currsize:
        end_all(folder())
        shutil.rmtree(folder(), ignore_errors=True)


os.register_at_fork(after_in_child=folder.cache_clear)  # it is the parent's
