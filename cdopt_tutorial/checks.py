"""The checks of every config: a bad value is a ValueError of one line."""

from collections.abc import Iterable
from typing import Any

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


def within(config: Any, least: int, most: int, *names: str) -> None:
    """Refuse settings outside of a range."""
    for name in names:
        fits = least <= getattr(config, name) <= most
        check(config, name, fits, f"{least} to {most}")


def workers(config: Any, name: str) -> None:
    """Refuse a number of workers that no machine is likely to hold."""
    within(config, 1, 256, name)


def widths(config: Any, *names: str) -> None:
    """Refuse widths of a model that no machine is likely to hold."""
    within(config, 1, 8192, *names)


def learning_rate(config: Any) -> None:
    """Refuse a learning rate with which not a single step can be computed."""
    fits = 0 < config.lr <= LARGEST_LR
    check(config, "lr", fits, f"above 0 and at most {LARGEST_LR:g}")
