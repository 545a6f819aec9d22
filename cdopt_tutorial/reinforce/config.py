"""Everything that one can choose about the agent and its observers."""

from dataclasses import dataclass

import numpy as np

from cdopt_tutorial.engines.device import pick_device
from cdopt_tutorial.reinforce.conversations import CONVERSATIONS

ENVIRONMENT = "CartPole-v1"

# What a conversation is good for: one environment where every step is a round trip,
# many where a round trip serves them all.
DEFAULT_NUM_ENVS = {"per-step": 1, "packed": 1, "batched": 16, "local-policy": 32}


@dataclass(frozen=True)
class ReinforceConfig:
    """Settings of a run; checked when they are made.

    Attributes:
        conversation: how observers and agent converse: "per-step", "packed",
            "batched" or "local-policy".
        num_observers: observers, each on a worker of its own, at least 1.
        num_envs: environments of each observer; None takes the conversation's
            default: 1, 1, 16 and 32 in this order.
        gamma: discount factor of the rewards, above 0 and at most 1.
        lr: learning rate of Adam, above 0.
        hidden: width of the policy's hidden layer.
        seed: of the policy's start, the environments and the choice of actions.
        max_episodes: episodes after which an unsolved run ends.
        log_interval: rounds between two log lines; in a round every environment
            runs one episode, and the agent learns once.
        device: where the agent keeps its policy, as
            :func:`~cdopt_tutorial.engines.device.pick_device` takes it and returns it.

    Raises:
        ValueError: a value is out of its range, or the device is not there.
    """

    conversation: str = "local-policy"
    num_observers: int = 2
    num_envs: int | None = None
    gamma: float = 0.99
    lr: float = 1e-2
    hidden: int = 128
    seed: int = 1
    max_episodes: int = 10_000
    log_interval: int = 10
    device: str = "cpu"

    def __post_init__(self):
        if self.conversation not in CONVERSATIONS:
            known = ", ".join(CONVERSATIONS)
            raise ValueError(
                f"conversation is {self.conversation!r}, but must be one of {known}"
            )
        if self.num_envs is None:
            object.__setattr__(self, "num_envs", DEFAULT_NUM_ENVS[self.conversation])
        for name in (
            "num_observers",
            "num_envs",
            "hidden",
            "max_episodes",
            "log_interval",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but must be at least 1"
                )
        if not 0 < self.gamma <= 1:
            raise ValueError(
                f"gamma is {self.gamma}, but must be above 0 and at most 1"
            )
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}, but must be above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, but must be at least 0")
        object.__setattr__(self, "device", pick_device(self.device))

    @property
    def episodes_per_round(self) -> int:
        """Episodes between two steps of the learner."""
        return self.num_observers * self.num_envs

    def seed_of(self, observer: int, purpose: str) -> int:
        """A seed of an observer's own, independent of all others'.

        Args:
            observer: number of the observer, from 0.
            purpose: "environments" or "actions".
        """
        stream = ("environments", "actions").index(purpose)
        sequence = np.random.SeedSequence([self.seed, observer, stream])
        return int(sequence.generate_state(1)[0])
