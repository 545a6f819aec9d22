"""Threads that come while another is at work, without a clock."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hosts import PATIENCE


class Second:
    """A thread that does something, and a lock that shows when it has got there.

    ``come`` starts the thread, once, and waits until the lock stops it; or
    until it is done, where nothing stops it.
    """

    def __init__(self, does: Callable[[], Any]):
        self._does, self._there = does, threading.Event()
        self._lock, self._first = threading.RLock(), threading.current_thread()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not self._first:
            self._there.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def come(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1)
            self._done = self._pool.submit(self._does)
            self._done.add_done_callback(lambda _: self._there.set())
            assert self._there.wait(PATIENCE)

    def done(self) -> Any:
        """What the thread returned."""
        return self._done.result(PATIENCE)
