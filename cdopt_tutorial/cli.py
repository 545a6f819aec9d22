"""The command `cdopt-tutorial`: run chapters, build the book, train, measure."""

import argparse
import signal
import sys

from cdopt_tutorial.commands import bench, hybrid, publish, reinforce, rnn
from cdopt_tutorial.commands.common import UsageError

COMMANDS = (reinforce, rnn, hybrid, bench, publish)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` and return its exit code.

    0: done; 1: what was run failed; 2: bad input, named in one line; 3: chapters ran,
    and a figure moved; 130: interrupted; 143: terminated.
    """
    # Terminated like interrupted: by an exception, so that everything is cleaned up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = _Parser(prog="cdopt-tutorial", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    try:
        args = parser.parse_args(argv)
        return args.run(args)
    except UsageError as error:
        print(f"cdopt-tutorial: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cdopt-tutorial: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
