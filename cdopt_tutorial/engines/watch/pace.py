"""Places that workers pass in step, so that one that gets no further is noticed."""

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_PACE = struct.Struct("<qdd128s")
_file = -1  # the launcher can read it whatever the worker is stuck in
_places = 0


class Pace(NamedTuple):
    """A worker's progress in work that it does in step with others."""

    places: int  # that it has passed
    until: float  # when it must have passed the next one, by time.monotonic
    seconds: float  # that it has for that
    waits_for: str  # name of the worker that it calls meanwhile; empty for none


def begin(path: Path) -> None:
    """Write this process's places to a file from now on."""
    global _file
    _file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)


def passed(seconds: float, waits_for: str = "") -> None:
    """Note that this worker has passed one more place in its work.

    Workers that wait for each other all pass the same places, so the one that has
    passed the fewest waits for none of the others. If it does not pass the next within
    these seconds, infinite after the last place, the launcher fails the run and names
    it, or the worker that it calls meanwhile, ``waits_for``. This takes two
    microseconds, and does nothing in a process that was not launched.
    """
    global _places
    if _file >= 0:
        _places += 1
        pace = _places, time.monotonic() + seconds, seconds, waits_for.encode()
        os.pwrite(_file, _PACE.pack(*pace), 0)


@contextmanager
def place(
    seconds: float, waits_for: str = "", then: float | None = None
) -> Iterator[None]:
    """Note a place before some work, and one after it; see `passed`.

    The work may take so many seconds, and so may the way to the next place, or else
    ``then`` seconds: infinite after a worker's last work.
    """
    passed(seconds, waits_for)
    yield
    passed(seconds if then is None else then)


def read_pace(path: Path) -> Pace | None:
    """A worker's progress, for the launcher; None if it passes no places."""
    with suppress(OSError, struct.error):  # not there yet, or empty
        *numbers, waits_for = _PACE.unpack(path.read_bytes())
        return Pace(*numbers, waits_for.rstrip(b"\0").decode())
    return None
