"""Chapter 1: an agent and its observers learn CartPole over RPC."""

from cdopt_tutorial.reinforce.learner import Episodes, Policy, discounted_returns
from cdopt_tutorial.reinforce.system import (
    CONVERSATIONS,
    Agent,
    Observer,
    ReinforceConfig,
    Round,
    Score,
    Training,
    check,
    run,
    run_agent,
    run_locally,
)

__all__ = [
    "CONVERSATIONS", "Agent", "Episodes", "Observer", "Policy", "ReinforceConfig",
    "Round", "Score", "Training", "check", "discounted_returns", "run", "run_agent",
    "run_locally",
]  # fmt: skip
