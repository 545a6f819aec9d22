"""Roles for the tests of chapter 1, on every engine; workers must import them."""

import time

from cdopt_tutorial.engines.probes.attach import wrap
from cdopt_tutorial.reinforce import Observer, run_agent


def train_each(engine, configs):
    """The agent's: several trainings, one after another."""
    return [run_agent(engine, config) for config in configs]


def slow_down():
    """Attached: every episode takes three seconds more."""

    def slowly(run_episode, *args):
        time.sleep(3)
        return run_episode(*args)

    wrap(Observer.run_episode, slowly)
