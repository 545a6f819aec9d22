"""Where calls from several workers wait for each other and are answered together."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch.futures import Future


class Rendezvous:
    """Collects what each expected guest brings, then answers all of them at once.

    No RPC thread blocks. ``answer`` gets what the guests brought, by guest in ascending
    order, whoever came first, and returns the answers by guest.
    """

    def __init__(self, answer: Callable[[dict], dict], guests: Iterable = ()):
        self._answer, self._lock = answer, threading.Lock()
        self.expect(guests)
        self._waiting: dict[Any, tuple[Any, Future]] = {}

    def expect(self, guests: Iterable) -> None:
        """Wait for these guests from now on."""
        self._expected = set(guests)

    def enter(self, guest: Any, brought: Any = None) -> Future:
        """Add a guest; the future completes once all the others are there, too."""
        future: Future = Future()
        with self._lock:
            if guest not in self._expected:
                raise RuntimeError(f"nobody waits for {guest!r} here")
            self._waiting[guest] = brought, future
        self._answer_if_complete()
        return future

    def leave(self, guest: Any) -> None:
        """No longer wait for this guest, nor answer it."""
        with self._lock:
            self._expected.discard(guest)
            self._waiting.pop(guest, None)
        self._answer_if_complete()

    def _answer_if_complete(self) -> None:
        with self._lock:
            if not self._waiting or self._waiting.keys() != self._expected:
                return
            ready, self._waiting = dict(sorted(self._waiting.items())), {}
        try:
            answers = self._answer({guest: each[0] for guest, each in ready.items()})
            answers = {guest: answers[guest] for guest in ready}
        except Exception as error:
            for _, future in ready.values():
                future.set_exception(error)
            return
        for guest, (_, future) in ready.items():
            future.set_result(answers[guest])


def all_that_was_brought(brought: dict) -> dict:
    """An answer for a :class:`Rendezvous`: everyone gets what everyone brought."""
    everything = list(brought.values())
    return dict.fromkeys(brought, everything)
