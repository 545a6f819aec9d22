"""What the tests run on several hosts, as a program of a reader's own."""

import os
import sys

from cdopt_tutorial.reinforce import ReinforceConfig, run
from cdopt_tutorial.run import Role, launch, serve


def train(on="rpc"):
    """A run that would take hours, whose calls wait no longer than 15 s."""
    endless = ReinforceConfig(lr=1e-9, max_episodes=10**7, num_envs=1)
    show = lambda _, each: print(f"round {each.number}", flush=True)  # noqa: E731
    run(endless, on=on, deadline=3600, rpc_timeout=15, on_report=show)


def disagree():
    """A run whose processes have its workers in other orders."""
    names = sorted(["a", "b"], reverse=os.environ["RANK"] == "1")
    launch({name: Role(serve) for name in names})


if __name__ == "__main__":
    disagree() if "sets" in sys.argv else train(*sys.argv[1:])
