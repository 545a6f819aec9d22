"""Which worker is late: to join, to get further, or to give a sign of life.

Whoever watches over workers keeps a :class:`Watched` of each and calls
:func:`find_late` every moment: ``group`` for processes of this host, ``driver`` for
actors, ``peers`` for the processes of torchrun.
"""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

from cdopt_tutorial.engines.watch.pace import Pace

TICK = 0.2  # seconds between two looks at the workers
LOST = 15.0  # seconds without a sign of life, after which a worker counts as lost
TOGETHER = 2.0  # seconds within which the workers of one host fall silent


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
