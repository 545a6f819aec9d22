"""How many steps observers take per second, and what the book stores of runs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.reinforce.speed import in_turns, pace
from cdopt_tutorial.rollouts import system
from cdopt_tutorial.rollouts.system import RolloutsConfig, Training


def measure(
    configs: Sequence[RolloutsConfig],
    repeats: int = 1,
    figure: Callable[[Training], Any] = pace,
    alone: Sequence[RolloutsConfig] = (),
) -> list[list[Any]]:
    """Environment steps per second, or another figure, of each config and repeat.

    Each repeat has its own seed, and so other waits. Last come those configs that one
    process runs `alone`, waits and all.
    """
    runs = [(system.train, each) for each in configs]
    runs += [(system.train_alone, each) for each in alone]
    engine = TorchRPC()
    turns = [
        [(role, engine, replace(of, seed=of.seed + turn)) for role, of in runs]
        for turn in range(repeats)
    ]
    return in_turns(turns, figure)


def stored() -> dict[str, Any]:
    """What `book/studies/lag.py` wrote for the book."""
    return json.loads((files(__package__) / "lag.json").read_text())
