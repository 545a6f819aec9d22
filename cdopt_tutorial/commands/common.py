"""What the subcommands share: flags, the results file, and how a run can fail."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdopt_tutorial import torchrun, whole_file


class UsageError(Exception):
    """The request can't be carried out; the message is the one line shown."""

    code = 2


class Failed(Exception):
    """The run failed; the message says how."""

    code = 1


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn an error in the user's input into a `UsageError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(error) from error


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, whose file is tested before anything runs."""
    results = "write the results to this file"
    parser.add_argument("--json", type=writable, metavar="FILE", help=results)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    text = "auto, cpu, cuda or cuda:N, to compute on (default: cpu)"
    parser.add_argument("--device", default="cpu", help=text)


def writable(name: str | Path) -> Path:
    """The path of a file that can be written; the test leaves it as it is."""
    path = Path(name)
    try:
        if torchrun.is_first():  # only this process writes it, maybe on another host
            whole_file.attempt(path)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error
    return path


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results to a file, if one is named, replacing it as a whole."""
    if path is not None and torchrun.is_first():
        whole_file.write(path, f"{json.dumps(results, indent=2)}\n".encode())
