"""`cdopt-tutorial reinforce`: train an agent on CartPole over RPC."""

import argparse
import math
from functools import partial

from cdopt_tutorial import reinforce
from cdopt_tutorial.commands import common, training

SMOKE = {"max_episodes": 40}
add = partial(training.add_flags, config=reinforce.ReinforceConfig)


def run(args: argparse.Namespace) -> int:
    """Train until solved; 1 if it was not, unless this is a smoke run."""
    with common.bad_input():
        config = training.read_config(args, reinforce.ReinforceConfig, SMOKE)
        on = training.read_engine(args)
    goal = f"reward threshold of {reinforce.Score.threshold}"
    print(f"This will run until {goal} is reached. Ctrl+C to exit.")
    log = partial(_log, config.log_interval)
    found = reinforce.run(config, on=on, deadline=math.inf, on_report=log)
    score = found.score
    common.write_json(args.json, found.as_json())
    if score.solved:
        print(f"Solved! Running reward is now {score.running_reward:.1f}!")
    else:
        print(f"Not solved after {len(score.rewards)} episodes.")
    speed = f"{score.env_steps / score.seconds:.0f} a second"
    print(f"{score.env_steps} environment steps in {score.seconds:.1f} s: {speed}")
    return 0 if score.solved or args.smoke else 1


def _log(interval: int, _, record: reinforce.Round) -> None:
    """Print the original's log line every few rounds."""
    if record.number % interval == 0:
        last = f"Episode {record.episodes}\tLast reward: {record.last_reward:.2f}"
        print(f"{last}\tAverage reward: {record.running_reward:.2f}", flush=True)
