"""What the tests run on several hosts, as a program of a reader's own."""

import sys

from cdopt_tutorial.reinforce import ReinforceConfig, run


def train(on="rpc"):
    """A run that would take hours, whose calls wait no longer than 15 s."""
    endless = ReinforceConfig(lr=1e-9, max_episodes=10**7, num_envs=1)
    show = lambda _, each: print(f"round {each.number}", flush=True)  # noqa: E731
    run(endless, on=on, deadline=3600, rpc_timeout=15, on_report=show)


if __name__ == "__main__":
    train(*sys.argv[1:])
