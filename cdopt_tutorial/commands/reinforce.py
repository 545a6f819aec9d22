"""`cdopt-tutorial reinforce`: train an agent and its observers on CartPole."""

from functools import partial
from typing import Any

from cdopt_tutorial import reinforce
from cdopt_tutorial.commands.training import Flags
from cdopt_tutorial.reinforce import ReinforceConfig as Config

SMOKE = {"max_episodes": 40}


def prepare(config: Config, flags: Flags) -> Config:
    """The config is the whole job."""
    return config


def train(job: Config, flags: Flags, **options: Any) -> dict[str, Any]:
    """Train until CartPole is solved."""
    result = reinforce.run(job, on_report=partial(log, job.log_interval), **options)
    return result.figures()


def log(interval: int, _, record: reinforce.Round) -> None:
    """Print the original's log line every few rounds."""
    if record.number % interval == 0:
        last = f"Episode {record.episodes}\tLast reward: {record.last_reward:.2f}"
        print(f"{last}\tAverage reward: {record.running_reward:.2f}", flush=True)
