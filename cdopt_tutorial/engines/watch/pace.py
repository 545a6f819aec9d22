"""Places that workers pass in step, so that one who gets no further is seen."""

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_PACE = struct.Struct("<qdd128s")
_file = -1  # which the launcher can read whatever the worker is stuck in
_places = 0


class Pace(NamedTuple):
    """How far a worker has come in work that it does in step with others."""

    places: int  # that it has passed
    until: float  # when it must have passed the next one, by time.monotonic
    seconds: float  # that it has for that
    waits_for: str  # name of the worker that it asks on the way; empty for none


def begin(path: Path) -> None:
    """Note the places of this process in a file from now on."""
    global _file
    _file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)


def passed(seconds: float, waits_for: str = "") -> None:
    """Note that this worker has passed one more place in its work.

    Workers that wait for each other all pass the same places, so the one that has
    passed the fewest waits for none of the others. If it passes no further one in
    these seconds, infinite behind the last, the launcher fails the run and names it,
    or the worker that it asks on the way, ``waits_for``. It costs two microseconds; in
    a process that was not launched nothing happens.
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
    """Note one place before some work of this worker's, and one after it.

    The work may take so many seconds, and ``then`` seconds may follow to the next
    place: as many by default, infinite behind a worker's last work. See `passed`.
    """
    passed(seconds, waits_for)
    yield
    passed(seconds if then is None else then)


def read_pace(path: Path) -> Pace | None:
    """How far a worker has come; None if it passes no places. For the launcher."""
    with suppress(OSError, struct.error):  # not there yet, or empty
        *numbers, waits_for = _PACE.unpack(path.read_bytes())
        return Pace(*numbers, waits_for.rstrip(b"\0").decode())
    return None
