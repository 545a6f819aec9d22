"""The command `cdopt-tutorial`: run chapters, build the book, train."""

import argparse
import os
import signal
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from typing import Never

import psutil

from cdopt_tutorial import scratch, torchrun
from cdopt_tutorial.commands import COMMANDS
from cdopt_tutorial.commands.common import Failed, UsageError, bad_input

STOPS: dict[int, str] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal was closed",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        raise UsageError(f"{message} (see {self.prog} --help)")


def entry() -> None:
    """Run the command line in a process of its own, which can be stopped any time."""
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # which nohup sets
            signal.signal(number, _stop)
    torchrun.enter()
    sys.exit(main())


def _stop(number: int, _: object) -> None:
    """End at once: whatever is being run or imported could swallow an exception.

    Child processes end with this one, and files are written whole or not at all.
    """
    os.write(2, f"cdopt-tutorial: {STOPS[number]}\n".encode())
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it may have ended
            process.kill()  # or it would complain that its files are gone
    scratch.remove()
    os._exit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` and return its exit code.

    0: done; 1: it failed; 2: bad input; 3: chapters ran, and a figure moved. A process
    that was stopped returns 128 plus the signal's number: 130 if it was interrupted.
    """
    name, *flags = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print("cdopt-tutorial COMMAND ...; COMMAND --help lists its flags\n")
        print("\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items()))
        return 0
    try:
        return _run(name, flags)
    except (UsageError, Failed) as error:
        print(f"cdopt-tutorial: {error}", file=sys.stderr)
        return error.code


def _run(name: str, flags: list[str]) -> int:
    """Import a command and run it; if a worker fails, its traceback is shown."""
    if name not in COMMANDS:
        raise UsageError(f"{name!r} is no command (see cdopt-tutorial --help)")
    with bad_input():
        tempfile.gettempdir()  # an OSError if none can be written
    if not torchrun.is_first():
        sys.stdout = open(os.devnull, "w")  # the first one prints
    from cdopt_tutorial.run import WorkerError  # late, like the command: with torch

    command = import_module(f"cdopt_tutorial.commands.{name}")
    try:
        if not hasattr(command, "add"):
            return command.run(flags)
        parser = _Parser(prog=f"cdopt-tutorial {name}", description=COMMANDS[name])
        command.add(parser)
        return command.run(parser.parse_args(flags))
    except torchrun.Unfit as error:
        raise UsageError(error) from error
    except (WorkerError, OSError) as error:  # such as a full disk
        raise Failed(error) from error
