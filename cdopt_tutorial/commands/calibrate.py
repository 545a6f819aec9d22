"""`cdopt-tutorial calibrate`: measure the constants of a prediction, in seconds."""

import argparse
from dataclasses import asdict

from cdopt_tutorial.commands import common, training
from cdopt_tutorial.rollouts import RolloutsConfig, speed


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    training.add_fields(parser, RolloutsConfig, ["num_envs"])
    common.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure for some seconds, write the constants, and print them."""
    with common.bad_input():
        config = RolloutsConfig(num_observers=1, num_envs=args.num_envs)
    costs = asdict(speed.calibrate(config.num_envs))
    common.write_json(args.json, costs)
    for name, value in costs.items():
        if isinstance(value, float):
            print(f"{name:8} {1000 * value:8.3f} ms")
