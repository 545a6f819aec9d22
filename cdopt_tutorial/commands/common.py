"""What the subcommands share: flags, the file of results, and how a run can fail."""

import argparse
import errno
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cdopt_tutorial import torchrun, whole_file

NAMES = {"penalty_param": "penalty"}  # of flags that are not called like their fields
LIKE_ONE_PROCESS = {"dtype": "float64", "dropout": 0.0}  # of --against-local


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


def check_finite(loss: float) -> None:
    """End a training that diverged."""
    if not math.isfinite(loss):
        raise Failed("the training diverged; lower --lr, or --penalty if it is above 1")


def add_training_flags(
    parser: argparse.ArgumentParser, config: type, run: Callable, without: str = ""
) -> None:
    """Add a flag for each field of a config but one, and those of all that train."""
    types, helps = get_type_hints(config), _attributes(config)
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
        same = "run the same in one process, too; in float64, and with no dropout"
        parser.add_argument("--against-local", action="store_true", help=same)
    add_run_flags(parser)
    add_device(parser, getattr(config, "device", "cpu"))
    parser.set_defaults(run=run)


def _attributes(config: type) -> dict[str, str]:
    """What the comments ``#:`` say above a class's fields, or behind them, by name."""
    field = r"((?:^ +#: .*\n)*)^ +(\w+): .+ = .+?(#: .*)?$"
    texts = {}
    for above, name, behind in re.findall(field, inspect.getsource(config), re.M):
        texts[name] = " ".join((above + behind).replace("#:", "").split())
    return texts


def _reading(hint: Any, default: Any) -> dict[str, Any]:
    """How argparse reads a value of this type, which may be None as well."""
    kind = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default else "store_true"}
    if get_origin(kind) is tuple:
        return _reading(get_args(kind)[0], None) | {"nargs": "+"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind)}


def read_config(args: argparse.Namespace, config: type, smoke: Mapping) -> Any:
    """The config that the flags describe, with what a smoke run has instead."""
    values = {}
    for field in fields(config):
        value = getattr(args, field.name, field.default)
        if field.name in LIKE_ONE_PROCESS and args.against_local:
            value = LIKE_ONE_PROCESS[field.name]
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return config(**values | (smoke if args.smoke else {}))


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
    if not torchrun.is_first():
        return path  # which the first one writes, maybe on another host
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if _is_replaced(path):
            whole_file.attempt(path)
        elif path.is_char_device():
            with path.open("wb", buffering=0) as device:
                device.write(b"")  # /dev/full does not take even nothing
        elif not os.access(path, os.W_OK):  # opened, a pipe would end for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error
    return path


def replaceable(name: str) -> Path:
    """The same, of a file that another one may replace; a device may not be."""
    path = writable(name)
    if not _is_replaced(path):
        raise UsageError(f"can't write {path}: it is not a regular file")
    return path


def _is_replaced(path: Path) -> bool:
    """Whether what is there, if anything, is a file that another one can replace."""
    return path.is_file() or not path.exists()


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results to a file, if there is one to write, which they replace at once."""
    if path is None or not torchrun.is_first():
        return
    text = json.dumps(results, indent=2) + "\n"
    if _is_replaced(path):
        whole_file.write(path, text.encode())
    else:  # a pipe, a terminal
        path.write_text(text)


def print_difference(difference: float) -> float:
    """Print, and return, how far a run is from the same one in one process."""
    print(f"largest difference from one process: {difference:.1e}")
    return difference
