"""Two workers of a process group, to be called under way; see test_network.py.

For each line of its input, whether they poll, it runs them and says when they wait;
they go on when the next line comes.
"""

import json
import sys
from pathlib import Path

import roles

from cdopt_tutorial.run import Role, launch


def main():
    for number, line in enumerate(sys.stdin):
        go, waiting = Path(sys.argv[1], f"go{number}"), []

        def note(*record, go=go, waiting=waiting):
            waiting.append(record)
            if len(waiting) == 2:
                print(json.dumps("under way"), flush=True)
                sys.stdin.readline()
                go.touch()

        system = {f"{rank}": Role(roles.meet_and_wait, (rank, go)) for rank in range(2)}
        launch(system, polling=json.loads(line), on_report=note)
        print(json.dumps("ended"), flush=True)


if __name__ == "__main__":
    main()
