"""Threads that come while another is at work, without a clock."""

import threading
from collections.abc import Callable
from typing import Any

from hosts import PATIENCE


class Second:
    """A thread that does something, and a lock that shows when it has got there.

    ``come`` starts the thread, once, and waits until the lock stops it; or
    until it is done, where nothing stops it.
    """

    def __init__(self, does: Callable[[], Any]):
        self._does, self._there = does, threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run)
        self.results: list[Any] = []

    def _run(self) -> None:
        try:
            self.results.append(self._does())
        finally:
            self._there.set()

    def __enter__(self) -> None:
        if threading.current_thread() is self._thread:
            self._there.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def come(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
            assert self._there.wait(PATIENCE)

    def done(self) -> Any:
        """What the thread returned."""
        self._thread.join(PATIENCE)
        (result,) = self.results
        return result
