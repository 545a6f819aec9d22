"""How many steps observers take per second, and what the book stores of runs."""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from cdopt_tutorial.reinforce import speed
from cdopt_tutorial.rollouts import system
from cdopt_tutorial.rollouts.system import RolloutsConfig, Training


def measure(
    configs: Sequence[RolloutsConfig],
    repeats: int = 1,
    figure: Callable[[Training], Any] = speed.pace,
    alone: Sequence[RolloutsConfig] = (),
) -> list[list[Any]]:
    """A figure of each config and repeat, as :func:`.reinforce.speed.measure` has it.

    Last come those configs that one process runs `alone`, waits and all.
    """
    runs = [(system.train, config) for config in configs]
    runs += [(system.train_alone, config) for config in alone]
    return speed.measure(runs, repeats, figure)


def stored() -> dict[str, Any]:
    """What `book/studies/lag.py` wrote for the book."""
    return json.loads((files(__package__) / "lag.json").read_text())
