"""How far workers have come, and which of them is late.

A worker that works in step with others notes the places that it passes. Whoever watches
over workers keeps a ``Watched`` of each and calls ``find_late`` every moment: ``group``
for processes of this host, ``driver`` for actors, ``peers`` for the processes of
torchrun.
"""

import math
import os
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

TICK = 0.2  # seconds between two looks at the workers
LOST = 15.0  # seconds without a sign of life, after which a worker counts as lost
TOGETHER = 2.0  # seconds within which the workers of one host fall silent

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


@dataclass(eq=False)
class Watched:
    """What its watcher knows of a worker."""

    name: str
    phase: str = "starting"  # then joining, running, serving, done or failed
    pace: Pace | None = None  # its progress in work that it does in step
    host: str = ""  # for messages, where there are several
    heard: float = math.inf  # its last sign of life, by time.monotonic, if it owes any
    patience: float = LOST  # seconds without one

    @property
    def settled(self) -> bool:
        return self.phase in ("done", "failed")


def find_late(
    workers: Collection[Watched], begin: float, join_deadline: float, own: str = ""
) -> tuple[str, str] | None:
    """The name of the late worker and the reason, as a ``WorkerError`` has it, or None.

    ``begin`` is when the run began, by ``time.monotonic``; ``own`` is the name of this
    process's worker, where others run on other hosts.
    """
    joining = [w for w in workers if w.phase == "starting"]
    joining = joining or [w for w in workers if w.phase == "joining"]
    if joining and time.monotonic() > begin + join_deadline:
        return joining[0].name, f"missed the deadline of {join_deadline:g} s to join"
    return _find_behind(workers) or _find_silent(workers, own)


def _find_behind(workers: Collection[Watched]) -> tuple[str, str] | None:
    """Of workers in step, the one furthest behind, for which the others wait."""
    in_step = [w for w in workers if w.pace and not w.settled]
    fewest = min((w.pace.places for w in in_step), default=0)
    for w in in_step:
        if w.pace.places == fewest and time.monotonic() > w.pace.until:
            missed = f"its deadline of {w.pace.seconds:g} s for its part of a step"
            return w.pace.waits_for or w.name, f"missed {missed}"
    return None


def _find_silent(workers: Collection[Watched], own: str) -> tuple[str, str] | None:
    """The worker that is lost, once one has been silent for longer than its patience.

    Of those on one host the first is named. A process that is itself cut off hears from
    nobody, not even from its own worker, and may have heard from any other last. So it
    prefers to name one on another host.
    """
    over = {w: time.monotonic() - w.heard - w.patience for w in workers}
    longest = max(workers, key=over.__getitem__)
    if over[longest] <= 0:
        return None
    silent = [w for w in workers if over[w] > -TOGETHER]
    suspects = workers if own in (w.name for w in silent) else silent
    here = next((w.host for w in workers if w.name == own), None)
    lost = next((w for w in suspects if w.host != here), silent[0])
    where = f"on {lost.host} " if lost.host else ""
    return lost.name, f"{where}has not been heard from for {longest.patience:g} s"
