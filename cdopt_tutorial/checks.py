"""The checks of every config: a bad value is a ValueError of one line."""

from collections.abc import Iterable
from typing import Any

import psutil

MB = 2**20
WORKER = 24 * MB  # the least memory that a worker takes for itself
# Adam's first step is 10 lr long, and float32 ends at 3.4e38.
LARGEST_LR = 1e37


def check(config: Any, name: str, fits: bool, allowed: str) -> None:
    """Raise a ValueError that names the value and what is allowed, unless it fits."""
    if not fits:
        value = getattr(config, name)
        raise ValueError(f"{name} is {value!r}, but must be {allowed}")


def choices(config: Any, **known: Iterable[str]) -> None:
    """Refuse a setting that is not one of its known names."""
    for name, names in known.items():
        allowed = list(names)
        check(config, name, getattr(config, name) in allowed, " or ".join(allowed))


def at_least(config: Any, minimum: float, *names: str) -> None:
    """Refuse settings below a minimum, NaN included, or too large for an int64."""
    for name in names:
        check(config, name, getattr(config, name) >= minimum, f"at least {minimum}")
        check(config, name, getattr(config, name) < 2**63, "below 2**63")


def learning_rate(config: Any) -> None:
    """Refuse a learning rate with which not a single step can be computed."""
    fits = 0 < config.lr <= LARGEST_LR
    check(config, "lr", fits, f"above 0 and at most {LARGEST_LR:g}")


def in_memory(what: str, size: int) -> None:
    """Refuse what takes at least ``size`` bytes if fewer are free on this machine."""
    free = free_memory()
    if size > free:
        takes = f"{what} takes at least {size // MB:,} MB"
        raise ValueError(f"{takes}, but {free // MB:,} MB of memory are free here")


def workers(config: Any, name: str, others: int) -> None:
    """Refuse more workers than fit into memory next to ``others`` of other roles."""
    free = free_memory()
    most = max(1, free // WORKER - others)
    why = f"a worker takes at least {WORKER // MB} MB, and {free // MB:,} MB are free"
    check(config, name, getattr(config, name) <= most, f"at most {most} here: {why}")


def free_memory() -> int:
    """Bytes that a run may take, with swap: nothing that would work is refused."""
    return psutil.virtual_memory().available + psutil.swap_memory().free
