"""`cdopt-tutorial reinforce`: train an agent and its observers on CartPole."""

from functools import partial

from cdopt_tutorial import reinforce
from cdopt_tutorial.commands import training
from cdopt_tutorial.reinforce import ReinforceConfig


def run(arguments: list[str]) -> int:
    """Train until CartPole is solved."""
    config, flags, options = training.read(
        "reinforce", ReinforceConfig, training.Flags, arguments, max_episodes=40
    )
    result = reinforce.run(config, on_report=partial(log, config), **options)
    repeat = partial(reinforce.run_locally, config)
    return training.finish(flags, result.figures(), result.weights, repeat)


def log(config: ReinforceConfig, _, record: reinforce.Round) -> None:
    """Print a line every few rounds, with the mean of the last 100 episodes."""
    if record.number % config.log_interval == 0:
        last = f"Episode {record.episodes}\tLast reward: {record.last_reward:.2f}"
        print(f"{last}\tAverage reward: {record.mean_reward:.2f}", flush=True)
