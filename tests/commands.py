"""Runs of `cdopt-tutorial` in one process, to be disturbed; see running.py.

For each line of its input, the arguments, it runs the command as a process of its own
would, and says to both outputs with which code that process would have ended.
"""

import json
import sys

from cdopt_tutorial.cli import entry


def main():
    for line in sys.stdin:
        sys.argv[1:] = json.loads(line)
        try:
            entry()
        except SystemExit as end:
            for output in (sys.stdout, sys.stderr):
                print(f"ended: {end.code}", file=output, flush=True)


if __name__ == "__main__":
    main()
