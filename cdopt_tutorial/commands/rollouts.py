"""`cdopt-tutorial rollouts`: let observers play CartPole ahead of the agent."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from cdopt_tutorial import rollouts
from cdopt_tutorial.commands import reinforce, training
from cdopt_tutorial.rollouts import RolloutsConfig as Config

SMOKE = {"max_episodes": 128}
prepare = reinforce.prepare


@dataclass(frozen=True)
class Flags(training.Flags):
    """The flags, besides the fields of the config."""

    #: repeat the run in one process, in the same order, and compare the weights
    replay: training.Switch = False


def train(job: Config, flags: Flags, **options: Any) -> dict[str, Any]:
    """Train until CartPole is solved, and repeat it by its schedule."""
    log = partial(reinforce.log, job.log_interval)
    result = rollouts.run(job, on_report=log, **options)
    repeat = partial(rollouts.run_locally, job, result.schedule)
    same = training.difference(flags.replay, result.weights, repeat)
    return result.figures() | same
