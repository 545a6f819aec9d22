"""The cost of age: how many episodes it takes to learn from rollouts of a fixed lag."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from cdopt_tutorial.rollouts.system import RolloutsConfig, run_locally

NUM_ENVS = 32
LIMIT = 6_400


def schedule(lag: int) -> Iterator[dict[int, int]]:
    """An endless schedule of two observers, whose rollouts are ``lag`` updates old."""
    for update in count():
        yield dict.fromkeys((0, 1), max(0, update - lag))


def episodes_needed(
    environment: str,
    lag: int,
    clip: float,
    lr: float,
    seed: int,
    device: str = "cpu",
    most: int = LIMIT,
) -> dict[str, Any]:
    """Train in this process: how many "episodes" it took, and whether it is "solved".

    Ratios are clipped to ``clip``, or left out if it is 0. The run ends after ``most``
    episodes, solved or not.
    """
    config = RolloutsConfig(
        environment=environment, max_lag=lag, clip=clip, lr=lr, seed=seed,
        device=device, num_envs=NUM_ENVS, max_episodes=most,
    )  # fmt: skip
    score = run_locally(config, schedule(lag)).score
    return {"episodes": len(score.rewards), "solved": score.solved}
