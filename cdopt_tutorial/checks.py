"""The checks of every config: a bad value is a ValueError of one line."""

from collections.abc import Iterable
from typing import Any

# The most of what takes a process or much memory, which no machine is likely to exceed.
MOST = {
    **dict.fromkeys(("num_observers", "num_ranks", "num_servers", "num_trainers"), 256),
    **dict.fromkeys(("embedding", "hidden", "width"), 8192),
    "num_envs": 10_000,  # of an observer
    "num_layers": 64,
    "max_lag": 1000,  # updates, for each of which the agent may keep weights
}
# In its first step Adam computes with 10 lr, and float32 ends at 3.4e38.
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
    """Refuse settings below a minimum, NaN included, or above ``MOST`` or an int64."""
    for name in names:
        value = getattr(config, name)
        if name in MOST:
            fits = minimum <= value <= MOST[name]
            check(config, name, fits, f"{minimum} to {MOST[name]}")
        else:
            check(config, name, value >= minimum, f"at least {minimum}")
            check(config, name, value < 2**63, "below 2**63")


def learning_rate(config: Any) -> None:
    """Refuse a learning rate with which not a single step can be computed."""
    fits = 0 < config.lr <= LARGEST_LR
    check(config, "lr", fits, f"above 0 and at most {LARGEST_LR:g}")
