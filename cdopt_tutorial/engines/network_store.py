"""A store for process groups, kept by one worker for all that can call it."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cdopt_tutorial.engines import network
from cdopt_tutorial.engines.store import register

SCHEME = "network"  # of the addresses at which groups meet: network://keeper/group
PATIENCE = timedelta(minutes=5)  # until a key must be there
PAUSE = 0.01  # seconds between two looks for one


class NetworkStore(dist.Store):
    """What torch's TCPStore does, but by calls to a worker: it opens no port."""

    def __init__(self, keeper: str):
        super().__init__()
        self._keeper = keeper
        self._patience = PATIENCE

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_set, key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(_get, key)

    def add(self, key: str, amount: int) -> int:
        return self._ask(_add, key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(_check, keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = time.monotonic() + (timeout or self._patience).total_seconds()
        while not self.check(keys):
            if time.monotonic() > limit:
                raise dist.DistStoreError(f"nobody has set {', '.join(keys)}")
            time.sleep(PAUSE)

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    def _ask(self, function: Callable, *args: Any) -> Any:
        here = network.current()
        if here.own_name() == self._keeper:
            return function(*args)
        return here.call(self._keeper, function, args)


def accept_meetings() -> None:
    """Let torch's groups meet at addresses of ``SCHEME``, in this process."""
    register(SCHEME, lambda place, group: dist.PrefixStore(group, _store_of(place)))


@functools.cache  # torch holds its C++ part only, and Python would take ours away
def _store_of(keeper: str) -> NetworkStore:
    return NetworkStore(keeper)


_kept: dict[str, bytes] = {}  # by the keeper
_lock = threading.Lock()


def _set(key: str, value: bytes) -> None:
    with _lock:
        _kept[key] = value


def _get(key: str) -> bytes:
    return _kept[key]


def _add(key: str, amount: int) -> int:
    with _lock:
        total = int(_kept.get(key, b"0")) + amount
        _kept[key] = b"%d" % total
        return total


def _check(keys: Sequence[str]) -> bool:
    return all(key in _kept for key in keys)
