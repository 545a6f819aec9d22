"""How many steps observers take in a second, by their number, lag and waits."""

from collections.abc import Sequence
from dataclasses import replace

from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.reinforce.speed import in_turns
from cdopt_tutorial.rollouts.system import RolloutsConfig, train


def measure(configs: Sequence[RolloutsConfig], repeats: int = 1) -> list[list[float]]:
    """Environment steps per second: for each config, one figure for each repeat.

    Each repeat has a seed of its own, and so other waits.
    """
    turns = [
        [(train, TorchRPC(), replace(each, seed=each.seed + turn)) for each in configs]
        for turn in range(repeats)
    ]
    return in_turns(turns)
