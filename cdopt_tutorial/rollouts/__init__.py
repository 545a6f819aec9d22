"""Chapter 8: observers play ahead of the trainer, and one process repeats the run."""

from cdopt_tutorial.rollouts.learner import Learner, Observer, Rollout, RolloutsConfig
from cdopt_tutorial.rollouts.system import (
    Trainer,
    Training,
    Update,
    check,
    in_step,
    run,
    run_locally,
    train,
)

__all__ = [
    "Learner", "Observer", "Rollout", "RolloutsConfig", "Trainer", "Training", "Update",
    "check", "in_step", "run", "run_locally", "train",
]  # fmt: skip
