"""What all subcommands share: bad input, options, the file of results, a failed run."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """What the user asked for can't be done; the message is the one line shown."""


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn an error in checking the user's input into a `UsageError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(error) from error


def add_device(parser: argparse.ArgumentParser, default: str = "cpu") -> None:
    """Add `--device`, which means the same in every command but for its default."""
    parser.add_argument(
        "--device",
        default=default,
        help=f"auto, cpu, cuda or cuda:N, to compute on (default: {default})",
    )


def add_run_options(parser: argparse.ArgumentParser, device: str = "cpu") -> None:
    """Add `--seed`, `--smoke`, `--json` and `--device` of every command that trains.

    Args:
        parser: of the command.
        device: the default one.
    """
    parser.add_argument(
        "--seed", type=int, default=1, help="of all chance (default: 1)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a run of seconds, to see that it works"
    )
    add_json(parser)
    add_device(parser, device)


def add_against_local(parser: argparse.ArgumentParser, without: str = "") -> None:
    """Add `--against-local`, which compares a run with the same one in one process.

    Args:
        parser: of the command.
        without: what the compared run goes without, if anything, for the help.
    """
    parser.add_argument(
        "--against-local",
        action="store_true",
        help=f"run the same in one process, too, in float64{without}",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, the file that the results go to."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results to this file"
    )


def check_writable(path: Path) -> None:
    """Check that a file can be written, without writing it.

    Raises:
        OSError: it can't; one line.
    """
    if path.is_dir():
        raise IsADirectoryError(f"can't write {path}: it is a directory")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            path.open("a").close()
    except OSError as error:
        raise OSError(f"can't write {path}: {error.strerror}") from error


class JsonFile:
    """A file for results: known to be writable before the work, whole after it.

    The results replace the file in one step at the end, so a run that fails leaves
    an earlier file as it was.

    Args:
        path: where the results go; None writes nothing.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, path: Path | None):
        self._path = path
        if path is not None:
            check_writable(path)

    def write(self, results: dict[str, Any]) -> None:
        """Write the results."""
        if self._path is None:
            return
        text = json.dumps(results, indent=2) + "\n"
        if self._path.exists() and not self._path.is_file():  # a pipe, a terminal
            self._path.write_text(text)
            return
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_text(text)
        beside.replace(self._path)


@contextmanager
def named_failure() -> Iterator[None]:
    """Show a failed worker as its name and traceback, without the launcher's own."""
    from cdopt_tutorial.engines import WorkerError

    try:
        yield
    except WorkerError as error:
        print(f"\ncdopt-tutorial: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def told(difference: float) -> float:
    """A run's difference from the same one in one process, printed and returned."""
    print(f"largest difference from one process: {difference:.1e}")
    return difference


def diverged() -> int:
    """Say in one line that a loss is no longer finite; the exit code of such a run."""
    print("cdopt-tutorial: the training diverged; lower --lr", file=sys.stderr)
    return 1
