"""Runs of all three systems, to be attacked under way; see test_network.py.

For each line of its input it runs one, says when the workers wait to be attacked, goes
on when the next line comes, and says how far the result is from that of one process.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

from cdopt_tutorial import hybrid, parameter_server, reinforce
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.run import worker

RL = reinforce.ReinforceConfig(conversation="packed", num_envs=1, max_episodes=4)
RNN = parameter_server.RNNConfig(
    embedding=6, hidden=5, dropout=0.0, seq_len=7, batch_size=5, epochs=2,
    dtype="float64",
)  # fmt: skip
HYBRID = hybrid.HybridConfig(embedding=8, epochs=2, max_steps=50, dtype="float64")


def reinforced(**options):
    there, here = reinforce.run(RL, **options), reinforce.run_locally(RL)
    return max_difference(there.weights, here.weights)


def served(**options):
    job = parameter_server.Job(RNN, Grammar(num_words=9).corpus(700, 200))
    there = parameter_server.run(job, **options)[0]
    return max_difference(there.weights, parameter_server.run_locally(job).weights)


def combined(**options):
    job = hybrid.Job(HYBRID)
    there = hybrid.run(job, **options)
    return max_difference(there.weights, hybrid.run_locally(job).weights)


def hold(go):
    """Attached to every worker: wait after the first report until told to go on."""
    report = worker._report

    def waits(record):
        report(record)
        while not go.exists():
            time.sleep(0.05)

    worker._report = waits


def main():
    for number, line in enumerate(sys.stdin):
        system, polling = json.loads(line)
        go = Path(sys.argv[1], f"go{number}")
        records = []

        def begin(*record, go=go, records=records):
            if not records:
                print(json.dumps("under way"), flush=True)
                sys.stdin.readline()
                go.touch()
            records.append(record)

        options = {"attach": partial(hold, go), "polling": polling, "on_report": begin}
        run = {"reinforce": reinforced, "rnn": served, "hybrid": combined}[system]
        print(json.dumps(run(**options)), flush=True)


if __name__ == "__main__":
    main()
