"""Chapter 8: observers play ahead of the agent, and one process repeats the run."""

from cdopt_tutorial.rollouts.learner import Learner, Observer, Rollout, RolloutsConfig
from cdopt_tutorial.rollouts.system import (
    AheadAgent,
    Training,
    Update,
    check,
    in_step,
    run,
    run_locally,
    train,
)

__all__ = [
    "AheadAgent", "Learner", "Observer", "Rollout", "RolloutsConfig", "Training",
    "Update", "check", "in_step", "run", "run_locally", "train",
]  # fmt: skip
