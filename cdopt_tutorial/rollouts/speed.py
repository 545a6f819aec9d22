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
    seeds = [(turn, config) for turn in range(repeats) for config in configs]
    paces = in_turns(
        (train, TorchRPC(), replace(config, seed=config.seed + turn))
        for turn, config in seeds
    )
    return [paces[i :: len(configs)] for i in range(len(configs))]
