"""`cdopt-tutorial reinforce`: train an agent on CartPole over RPC."""

import argparse

from cdopt_tutorial.commands.common import (
    JsonFile,
    add_run_options,
    bad_input,
    named_failure,
)

SMOKE_EPISODES = 40


def add(commands) -> None:
    """Add the parser."""
    parser = commands.add_parser(
        "reinforce", help="chapter 1: train an agent and its observers on CartPole"
    )
    option = parser.add_argument
    option(
        "--conversation",
        default="local-policy",
        help="per-step, packed, batched or local-policy",
    )
    option("--num-observers", type=int, metavar="N", help="observers (default: 2)")
    option(
        "--world-size",
        type=int,
        metavar="W",
        help="workers: one agent and W - 1 observers",
    )
    option("--num-envs", type=int, metavar="N", help="environments of each observer")
    option(
        "--gamma",
        type=float,
        default=0.99,
        metavar="G",
        help="discount (default: 0.99)",
    )
    option(
        "--lr", type=float, default=1e-2, help="Adam's learning rate (default: 0.01)"
    )
    option(
        "--log-interval",
        type=int,
        default=10,
        metavar="N",
        help="rounds between log lines",
    )
    option(
        "--max-episodes",
        type=int,
        default=10_000,
        metavar="N",
        help="give up after these",
    )
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train until solved; 1 if it was not, unless it was only to be tried."""
    from cdopt_tutorial import reinforce

    with bad_input():
        config = reinforce.ReinforceConfig(
            conversation=args.conversation,
            num_observers=_num_observers(args),
            num_envs=args.num_envs,
            gamma=args.gamma,
            lr=args.lr,
            seed=args.seed,
            max_episodes=SMOKE_EPISODES if args.smoke else args.max_episodes,
            log_interval=args.log_interval,
            device=args.device,
        )
        results = JsonFile(args.json)
    print(
        f"This will run until reward threshold of {reinforce.Score.threshold} is "
        "reached. Ctrl+C to exit."
    )
    with named_failure():
        training = reinforce.run(config, deadline=float("inf"), on_report=_log(config))
    score = training.score
    results.write(training.as_json())
    if score.solved:
        print(f"Solved! Running reward is now {score.running_reward:.1f}!")
    else:
        print(f"Not solved after {len(score.rewards)} episodes.")
    print(
        f"{score.env_steps} environment steps in {score.seconds:.1f} s: "
        f"{score.env_steps / score.seconds:.0f} a second"
    )
    return 0 if score.solved or args.smoke else 1


def _num_observers(args: argparse.Namespace) -> int:
    if args.world_size is None:
        return 2 if args.num_observers is None else args.num_observers
    if args.world_size < 2:
        raise ValueError(
            f"world size is {args.world_size}, but must be at least 2: "
            "one agent and one observer"
        )
    if args.num_observers not in (None, args.world_size - 1):
        raise ValueError(
            f"world size {args.world_size} means {args.world_size - 1} observers, "
            f"but num-observers is {args.num_observers}"
        )
    return args.world_size - 1


def _log(config):
    """Print the original's log line after every few rounds."""

    def log(_, record) -> None:
        if record.number % config.log_interval == 0:
            print(
                f"Episode {record.episodes}\tLast reward: {record.last_reward:.2f}\t"
                f"Average reward: {record.running_reward:.2f}",
                flush=True,
            )

    return log
