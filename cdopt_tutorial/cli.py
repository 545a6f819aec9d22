"""The command `cdopt-tutorial`: run chapters, build the book, train."""

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module

import psutil

from cdopt_tutorial import scratch, torchrun
from cdopt_tutorial.commands import COMMANDS, Failed

STOPS: dict[int, str] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal was closed",
}


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
    if not torchrun.is_first():
        sys.stdout = open(os.devnull, "w")  # the first one prints
    from cdopt_tutorial.run import WorkerError  # late, like the command: with torch

    part = "book" if name in ("execute", "build") else "train"
    try:
        if name not in COMMANDS:
            raise ValueError(f"{name!r} is no command (see cdopt-tutorial --help)")
        return import_module(f"cdopt_tutorial.commands.{part}").run(name, flags)
    except (ValueError, WorkerError, Failed, OSError) as error:  # such as a full disk
        print(f"cdopt-tutorial: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
