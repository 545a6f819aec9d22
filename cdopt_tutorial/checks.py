"""What every config says of a value that it does not take: one line, a ValueError."""

from collections.abc import Iterable
from typing import Any


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
    """Refuse settings below a minimum; NaN is below it, too."""
    for name in names:
        check(config, name, getattr(config, name) >= minimum, f"at least {minimum}")
