"""Where the observers' questions wait until they can be answered together."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch.futures import Future


class WaitingRoom:
    """Collects one question of each expected guest, then answers them all at once.

    Used by the agent; entered from its RPC threads, none of which has to block.

    Args:
        answer: given the guests' questions by guest, returns their answers; called
            in the thread of the last to arrive, guests in ascending order.
    """

    def __init__(self, answer: Callable[[dict], dict]):
        self._answer = answer
        self._lock = threading.Lock()
        self._expected: set = set()
        self._waiting: dict[Any, tuple[Any, Future]] = {}

    def expect(self, guests: Iterable) -> None:
        """These are the guests whose questions are answered together."""
        self._expected = set(guests)

    def enter(self, guest: Any, question: Any) -> Future:
        """Leave a question; the future completes once all the others have asked too."""
        future: Future = Future()
        with self._lock:
            self._waiting[guest] = question, future
            ready = self._take_if_complete()
        self._serve(ready)
        return future

    def leave(self, guest: Any) -> None:
        """Do not wait for this guest any more."""
        with self._lock:
            self._expected.discard(guest)
            ready = self._take_if_complete()
        self._serve(ready)

    def _take_if_complete(self) -> dict[Any, tuple[Any, Future]]:
        if self._waiting.keys() != self._expected:
            return {}
        # Ascending, so that the answers do not depend on who came first.
        ready = dict(sorted(self._waiting.items()))
        self._waiting = {}
        return ready

    def _serve(self, ready: dict[Any, tuple[Any, Future]]) -> None:
        if not ready:
            return
        try:
            answers = self._answer(
                {guest: question for guest, (question, _) in ready.items()}
            )
        except Exception as error:
            for _, future in ready.values():
                future.set_exception(error)
            return
        for guest, (_, future) in ready.items():
            future.set_result(answers[guest])
