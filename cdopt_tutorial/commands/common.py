"""What the subcommands share: flags, the file of results, and how a run can fail."""

import argparse
import inspect
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

NAMES = {"penalty_param": "penalty"}  # of flags that are not called like their fields


class UsageError(Exception):
    """What the user asked for can't be done; the message is the one line shown."""

    code = 2


class Failed(Exception):
    """What was run has failed; the message says how."""

    code = 1


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn an error in checking the user's input into a `UsageError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(error) from error


@contextmanager
def named_failure() -> Iterator[None]:
    """Turn a worker's failure into a `Failed`: its name and traceback, and no other."""
    from cdopt_tutorial.engines import WorkerError

    try:
        yield
    except WorkerError as error:
        raise Failed(error) from error


def check_finite(loss: float) -> None:
    """End a training that diverged."""
    if not math.isfinite(loss):
        raise Failed("the training diverged; lower --lr")


def add_training_flags(
    parser: argparse.ArgumentParser, config: type, run: Callable, without: str = ""
) -> None:
    """Add a flag for each field of a config, and those of all commands that train.

    Args:
        parser: of the command.
        config: a dataclass; comments ``#:`` say what its fields are.
        run: the command itself.
        without: a field that gets no flag.
    """
    types, helps = get_type_hints(config), attributes(config)
    for field in fields(config):
        if field.name in (without, "dtype", "device"):
            continue
        text = helps[field.name].partition(". ")[0].removesuffix(".")
        if not isinstance(field.default, bool | None):
            text += f" (default: {field.default})"
        parser.add_argument(
            "--" + NAMES.get(field.name, field.name).replace("_", "-"),
            dest=field.name,
            default=field.default,
            help=text.replace("%", "%%").replace("``", ""),
            **_reading(types[field.name], field.default),
        )
    if "dtype" in types:
        parser.add_argument(
            "--against-local",
            action="store_true",
            help="run the same in one process, too; in float64, and with no dropout",
        )
    add_run_flags(parser)
    add_device(parser, getattr(config, "device", "cpu"))
    parser.set_defaults(run=run)


def attributes(config: type) -> dict[str, str]:
    """What the comments ``#:`` say above a class's fields, or behind them, by name."""
    field = r"((?:^ +#: .*\n)*)^ +(\w+): .+ = .+?(#: .*)?$"
    entries = re.findall(field, inspect.getsource(config), re.MULTILINE)
    return {
        name: " ".join((above + behind).replace("#:", "").split())
        for above, name, behind in entries
    }


def _reading(hint: Any, default: Any) -> dict[str, Any]:
    """How argparse reads a value of this type, which may be None as well."""
    kind = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default else "store_true"}
    if get_origin(kind) is tuple:
        return _reading(get_args(kind)[0], None) | {"nargs": "+"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind)}


def read_config(args: argparse.Namespace, config: type, **fixed: Any) -> Any:
    """The config that the flags describe; what is fixed stands above them.

    Raises:
        ValueError: a value is out of its range.
    """
    values = {}
    for field in fields(config):
        value = getattr(args, field.name, field.default)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    if "dtype" in values and args.against_local:
        values["dtype"] = "float64"
    return config(**values | fixed)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--smoke` and `--json` of every command that trains or measures."""
    parser.add_argument(
        "--smoke", action="store_true", help="a run of seconds, to see that it works"
    )
    parser.add_argument(
        "--json", type=writable, metavar="FILE", help="write the results to this file"
    )


def add_device(parser: argparse.ArgumentParser, default: str = "cpu") -> None:
    """Add `--device`, which means the same in every command but for its default."""
    parser.add_argument(
        "--device",
        default=default,
        help=f"auto, cpu, cuda or cuda:N, to compute on (default: {default})",
    )


def writable(name: str) -> Path:
    """The path of a file that can be written, which is seen without writing it.

    Raises:
        UsageError: it can't.
    """
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"can't write {path}: it is a directory")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            path.open("a").close()
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error
    return path


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results to a file, if there is one to write, which they replace at once."""
    if path is None:
        return
    text = json.dumps(results, indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe, a terminal
        path.write_text(text)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def print_difference(difference: float) -> float:
    """Print how far a run is from the same one in one process; the difference."""
    print(f"largest difference from one process: {difference:.1e}")
    return difference
