"""How many steps observers take in a second, by their number, lag and waits."""

from collections.abc import Sequence
from dataclasses import replace

from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.rollouts.learner import RolloutsConfig
from cdopt_tutorial.rollouts.system import train


def measure(configs: Sequence[RolloutsConfig], repeats: int = 1) -> list[list[float]]:
    """Environment steps per second: for each config, one figure for each repeat.

    All run in one launch, in turns, so that a slow second hits all alike; each turn has
    a seed of its own, and so other waits.
    """
    most = max(config.num_observers for config in configs)
    roles = {"agent": Role(_measure, (TorchRPC(), configs, repeats))}
    roles |= {f"observer{i}": Role(serve) for i in range(most)}
    return launch(roles, rpc_threads=2, deadline=3600)["agent"]


def _measure(
    engine: Workers, configs: Sequence[RolloutsConfig], repeats: int
) -> list[list[float]]:
    found = [[] for _ in configs]
    for turn in range(repeats):
        for config, paces in zip(configs, found, strict=True):
            score = train(engine, replace(config, seed=config.seed + turn)).score
            paces.append(score.env_steps / score.seconds)
    return found
