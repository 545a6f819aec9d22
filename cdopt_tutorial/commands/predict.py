"""`cdopt-tutorial predict`: the speed of a run, from what `calibrate` measured."""

import argparse
import json
from dataclasses import replace
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
    common.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print the parts of a step, what limits the run, and the speed of each variant."""
    with common.bad_input():
        config = RolloutsConfig(**{name: getattr(args, name) for name in FLAGS})
        costs = _read(args.costs) if args.costs else speed.calibrate(config.num_envs)
        in_step = replace(config, max_lag=0)
        found = {"one process": predict(costs, in_step, alone=True)}
        found |= {"in step": predict(costs, in_step)}
        found |= {f"ahead, max_lag {config.max_lag}": predict(costs, config)}
    parts, bounds = costs.parts(config), costs.bounds(config)
    limit, (knee, then) = min(bounds, key=bounds.get), costs.knee(config)
    results = {"parts": parts, "bounds": bounds, "limit": limit, "knee": knee}
    common.write_json(args.json, results | {"predicted": found})
    for name, seconds in parts.items():
        print(f"{name:8} {1000 * seconds:9.2f} ms")
    for name, most in bounds.items():
        print(f"{name} alone would allow {most:,.0f} steps/s")
    print(f"what limits: {limit}; from {knee} observers on: {then}")
    for name, (pace, lag) in found.items():
        print(f"{name:18} {pace:9,.0f} steps/s, mean lag {lag:.2f}")


def _read(path: Path) -> Costs:
    try:
        return Costs(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of `calibrate`: {error}") from error
