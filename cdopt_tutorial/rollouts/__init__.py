"""Chapter 8: observers play ahead of the agent, and one process repeats the run."""

from cdopt_tutorial.rollouts.system import (
    Learner,
    Observer,
    RolloutsConfig,
    run,
    run_locally,
    train,
    train_alone,
)
