"""`cdopt-tutorial predict`: the speed of a run, from what `calibrate` measured."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from cdopt_tutorial.commands import common, training
from cdopt_tutorial.rollouts import RolloutsConfig, speed
from cdopt_tutorial.rollouts.predict import Costs, predict

FLAGS = ("num_observers", "num_envs", "max_lag", "num_rollouts", "step_ms", "waits")
FLAGS += ("seed", "max_episodes")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("system", choices=["rollouts"], help="what is to be run")
    costs = "what `calibrate --json` has written; by default it is measured now"
    parser.add_argument("--costs", type=Path, metavar="FILE", help=costs)
    training.add_fields(parser, RolloutsConfig, FLAGS)
    parser.set_defaults(run=run)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the parts, what limits, and the speed of each way to run it."""
    with common.bad_input():
        config = RolloutsConfig(**{name: getattr(args, name) for name in FLAGS})
        costs = args.costs and _read(args.costs)
    costs = costs or speed.calibrate(config.num_envs)
    ways = {"one process": (replace(config, max_lag=0), True)}
    ways |= {"in step": (replace(config, max_lag=0),)}
    ways |= {f"ahead, max_lag {config.max_lag}": (config,)} if config.max_lag else {}
    with common.bad_input():
        found = {name: predict(costs, *way) for name, way in ways.items()}
    parts, bounds = costs.parts(config), costs.bounds(config)
    limit, (knee, then) = min(bounds, key=bounds.get), costs.knee(config)
    results = {"parts": parts, "bounds": bounds, "limit": limit, "knee": knee}
    predicted = {name: asdict(each) for name, each in found.items()}
    common.write_json(args.json, results | {"predicted": predicted})
    for name, seconds in parts.items():
        print(f"{name:8} {1000 * seconds:9.2f} ms")
    print(
        *(f"{name} alone: {most:,.0f} steps/s" for name, most in bounds.items()),
        sep="\n",
    )
    print(f"what limits: {limit}; from {knee} observers on: {then}")
    for name, each in found.items():
        speed_and_lag = (
            f"{each.steps_per_second:9,.0f} steps/s, mean lag {each.mean_lag:.2f}"
        )
        print(f"{name:18} {speed_and_lag}")
    return 0


def _read(path: Path) -> Costs:
    try:
        return Costs(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of `calibrate`: {error}") from error
