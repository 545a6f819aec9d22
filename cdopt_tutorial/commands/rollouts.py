"""`cdopt-tutorial rollouts`: let observers play CartPole ahead of the agent."""

from functools import partial

from cdopt_tutorial import rollouts
from cdopt_tutorial.commands import reinforce, training


def run(arguments: list[str]) -> int:
    """Train until CartPole is solved, and repeat it by its schedule."""
    config, flags, options = training.read(
        "rollouts", rollouts.RolloutsConfig, training.Flags, arguments, max_episodes=128
    )
    log = partial(reinforce.log, config)
    result = rollouts.run(config, on_report=log, **options)
    repeat = partial(rollouts.run_locally, config, result.schedule)
    return training.finish(flags, result.figures(), result.weights, repeat)
