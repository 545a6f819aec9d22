"""`cdopt-tutorial reinforce`: train an agent on CartPole over RPC."""

import argparse
import math
from functools import partial

from cdopt_tutorial import reinforce
from cdopt_tutorial.commands import common, training
from cdopt_tutorial.reinforce import ReinforceConfig
from cdopt_tutorial.reinforce.steady import Lost

SMOKE = {"max_episodes": 40}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    training.add_flags(parser, ReinforceConfig, run)
    workers = "workers: one agent and N - 1 observers"
    parser.add_argument("--world-size", type=int, metavar="N", help=workers)
    parser.set_defaults(num_observers=None)  # so that the two can be compared


def run(args: argparse.Namespace) -> int:
    """Train until solved; 1 if it was not, unless it was only to be tried."""
    with common.bad_input():
        args.num_observers = _num_observers(args.world_size, args.num_observers)
        config = training.read_config(args, ReinforceConfig, SMOKE)
        reinforce.check(config)
        engine = training.read_engine(args)
    goal = f"reward threshold of {reinforce.Score.threshold}"
    print(f"This will run until {goal} is reached. Ctrl+C to exit.")
    log = partial(_log, config.log_interval)
    found = reinforce.run(config, engine, deadline=math.inf, on_report=log)
    score = found.score
    common.write_json(args.json, found.as_json())
    if score.solved:
        print(f"Solved! Running reward is now {score.running_reward:.1f}!")
    else:
        print(f"Not solved after {len(score.rewards)} episodes.")
    speed = f"{score.env_steps / score.seconds:.0f} a second"
    print(f"{score.env_steps} environment steps in {score.seconds:.1f} s: {speed}")
    return 0 if score.solved or args.smoke else 1


def _num_observers(size: int | None, number: int | None) -> int:
    if size is None:
        return ReinforceConfig.num_observers if number is None else number
    if size < 2:
        least = "at least 2: one agent and one observer"
        raise ValueError(f"world size is {size}, but must be {least}")
    if number not in (None, size - 1):
        means = f"world size {size} means {size - 1} observers"
        raise ValueError(f"{means}, but num-observers is {number}")
    return size - 1


def _log(interval: int, _, record: reinforce.Round | Lost) -> None:
    """Print the original's log line after every few rounds, and who died at once."""
    if isinstance(record, Lost):
        told = f"{record.observer} died and is replaced"
        print(f"{told}: nothing of it counts in round {record.round}", flush=True)
    elif record.number % interval == 0:
        last = f"Episode {record.episodes}\tLast reward: {record.last_reward:.2f}"
        print(f"{last}\tAverage reward: {record.running_reward:.2f}", flush=True)
