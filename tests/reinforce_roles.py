"""A role for the tests of chapter 1, on every engine; workers must import it."""

from cdopt_tutorial.reinforce import run_agent


def train_each(configs):
    """The agent's: several trainings, one after another."""
    return [run_agent(config) for config in configs]
