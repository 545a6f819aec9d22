"""Chapter 8: observers play ahead of the agent, and one process repeats the run."""

from cdopt_tutorial.reinforce.system import check
from cdopt_tutorial.rollouts import age
from cdopt_tutorial.rollouts.system import (
    AheadAgent,
    Learner,
    Observer,
    Rollout,
    RolloutsConfig,
    Training,
    in_step,
    run,
    run_locally,
    train,
)

__all__ = [
    "AheadAgent", "Learner", "Observer", "Rollout", "RolloutsConfig", "Training",
    "check", "in_step", "run", "run_locally", "train",
]  # fmt: skip
