"""What every config says of a value that it does not take: one line, a ValueError."""

from collections.abc import Iterable
from typing import Any

import psutil

MB = 2**20
WORKER = 24 * MB  # bytes of its own that any worker takes, at the least
# Adam's first step is 10 lr long, and must be a number of float32: those end at 3.4e38.
LARGEST_LR = 1e37


def check(config: Any, name: str, fits: bool, allowed: str) -> None:
    """Unless it fits, a ValueError with a config's value, and what is allowed."""
    if not fits:
        value = getattr(config, name)
        raise ValueError(f"{name} is {value!r}, but must be {allowed}")


def choices(config: Any, **known: Iterable[str]) -> None:
    """Refuse settings that are none of the names known for them."""
    for name, names in known.items():
        allowed = list(names)
        check(config, name, getattr(config, name) in allowed, " or ".join(allowed))


def at_least(config: Any, minimum: float, *names: str) -> None:
    """Refuse settings below a minimum, as NaN is, or too large for torch to count."""
    for name in names:
        check(config, name, getattr(config, name) >= minimum, f"at least {minimum}")
        check(config, name, getattr(config, name) < 2**63, "below 2**63")


def learning_rate(config: Any) -> None:
    """Refuse a learning rate with which not even one step can be computed."""
    fits = 0 < config.lr <= LARGEST_LR
    check(config, "lr", fits, f"above 0 and at most {LARGEST_LR:g}")


def in_memory(what: str, size: int) -> None:
    """Refuse what takes so many bytes, at the least, if fewer are free here."""
    free = free_memory()
    if size > free:
        takes = f"{what} takes at least {size // MB:,} MB"
        raise ValueError(f"{takes}, but {free // MB:,} MB of memory are free here")


def workers(config: Any, name: str, others: int) -> None:
    """Refuse more workers than fit into memory, beside so many that have other work."""
    free = free_memory()
    most = max(1, free // WORKER - others)
    why = f"a worker takes at least {WORKER // MB} MB, and {free // MB:,} MB are free"
    check(config, name, getattr(config, name) <= most, f"at most {most} here: {why}")


def free_memory() -> int:
    """Bytes that a run may take; where swap counts, nothing is refused that works."""
    return psutil.virtual_memory().available + psutil.swap_memory().free
