"""What the subcommands share: flags, the file of results, and how a run can fail."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdopt_tutorial import torchrun, whole_file


class UsageError(Exception):
    """What the user asked for can't be done; the message is the one line shown."""

    code = 2


class Failed(Exception):
    """What was run has failed; the message says how."""

    code = 1


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn an error in the user's input into a `UsageError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(error) from error


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--smoke` and `--json` of every command that trains or measures."""
    smoke = "a run of seconds, to see that it works"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`; that the file can be written is known before anything runs."""
    results = "write the results to this file"
    parser.add_argument("--json", type=writable, metavar="FILE", help=results)


def add_device(parser: argparse.ArgumentParser, default: str = "cpu") -> None:
    """Add `--device`, which means the same in every command but for its default."""
    text = f"auto, cpu, cuda or cuda:N, to compute on (default: {default})"
    parser.add_argument("--device", default=default, help=text)


def writable(name: str) -> Path:
    """The path of a file that can be written; tried without writing it."""
    path = Path(name)
    try:
        if torchrun.is_first():  # which writes it, maybe on another host
            whole_file.attempt(path)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error
    return path


def replaceable(name: str) -> Path:
    """The same, of a file that another one may replace; a device may not be."""
    path = writable(name)
    if whole_file.is_stream(path):
        raise UsageError(f"can't write {path}: it is not a regular file")
    return path


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results to a file, if there is one to write, which they replace at once."""
    if path is not None and torchrun.is_first():
        whole_file.write(path, f"{json.dumps(results, indent=2)}\n".encode())
