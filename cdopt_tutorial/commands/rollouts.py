"""`cdopt-tutorial rollouts`: observers play CartPole ahead of the agent."""

import argparse
import math
from functools import partial

from cdopt_tutorial import rollouts, torchrun
from cdopt_tutorial.commands import common, training
from cdopt_tutorial.reinforce import Round

SMOKE = {"max_episodes": 128}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    training.add_flags(parser, rollouts.RolloutsConfig)
    again = "repeat the run in one process, in the same order, and compare the weights"
    parser.add_argument("--replay", action="store_true", help=again)


def run(args: argparse.Namespace) -> int:
    """Train until solved; 1 if it was not, unless this is a smoke run."""
    with common.bad_input():
        config = training.read_config(args, rollouts.RolloutsConfig, SMOKE)
        on = training.read_engine(args)
    log = partial(_log, config.log_interval)
    found = rollouts.run(config, on=on, deadline=math.inf, on_report=log)
    score, results = found.score, found.as_json()
    repeat = partial(rollouts.run_locally, config, found.schedule)
    results["max_parameter_difference"] = training.difference(
        args.replay and torchrun.is_first(), found.weights, repeat
    )
    common.write_json(args.json, results)
    print("Solved" if score.solved else "Not solved", f"after {score.rounds} updates:")
    speed = f"{score.env_steps / score.seconds:.0f} a second"
    print(f"{score.env_steps} environment steps in {score.seconds:.1f} s: {speed}")
    lags = ", ".join(f"{n} of lag {lag}" for lag, n in results["lag"].items())
    print(f"rollouts: {lags}; largest ratio {results['max_ratio']:.2f}")
    return 0 if score.solved or args.smoke else 1


def _log(interval: int, _, record: Round) -> None:
    if record.number % interval == 0:
        mean = f"update {record.number}\tmean reward {record.mean_reward:.1f}"
        print(f"{mean}\tlag {record.lag}\tratio {record.max_ratio:.2f}", flush=True)
