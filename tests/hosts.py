"""Hosts for a test, which only root can make."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cdopt_tutorial.bench.hosts import NET, PATIENCE, RAY_PORT, Hosts, check

__all__ = ["NET", "PATIENCE", "RAY_PORT", "hosts", "need_hosts", "wait_until"]


@contextmanager
def hosts(number: int) -> Iterator[Hosts]:
    """So many; where they can't be made the test is skipped, but not in CI."""
    need_hosts()
    with Hosts(number) as made:
        yield made


def need_hosts() -> None:
    """Skip a test where no hosts can be made; in CI it fails."""
    try:
        check()
    except ValueError as why:
        end = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        end(str(why))


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """It must hold within so many seconds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
