"""The subcommands, of the book and of the systems, and what they share.

``book.run(name, arguments)`` and ``train.run(name, arguments)`` return the exit code.
"""

import json
import os
from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.conf import DisallowNone
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from cdopt_tutorial import torchrun, whole_file

COMMANDS = {
    "reinforce": "chapter 1: train an agent and its observers on CartPole",
    "rnn": "chapter 2: train an RNN split over a trainer and a server",
    "hybrid": "chapter 5: train a table by RPC, and replicas of a layer by DDP",
    "shard": "chapter 6: train a transformer in copies, shards, parts or stages",
    "rollouts": "chapter 8: let observers play ahead of the agent",
    "execute": "run chapters that have no result yet, compare their figures",
    "build": "run the chapters, then render the book",
}
Flags = TypeVar("Flags")
numbers = ConstructorRegistry()


class Failed(Exception):
    """The run failed; the message says how, in one line."""


def read_flags(name: str, flags: type[Flags], arguments: list[str]) -> Flags:
    """The flags of a command, from the fields of a dataclass; tyro may exit with 2."""
    return tyro.cli(
        flags, prog=f"cdopt-tutorial {name}", description=COMMANDS[name],
        args=arguments, registry=numbers, config=(DisallowNone,),
    )  # fmt: skip


@numbers.primitive_rule
def _number(info: Any) -> PrimitiveConstructorSpec | None:
    """How a number is read; a ValueError would be framed by tyro, no other error is."""
    if (kind := info.type) not in (int, float):
        return None

    def read(texts: list[str]) -> float:
        with suppress(ValueError):
            return kind(texts[0])
        raise ArgumentTypeError(f"{texts[0]!r} is not of the type {kind.__name__}")

    return PrimitiveConstructorSpec(
        nargs=1, metavar=kind.__name__.upper(), instance_from_str=read,
        is_instance=lambda x: isinstance(x, kind), str_from_instance=lambda x: [str(x)],
    )  # fmt: skip


def check_writable(path: Path | None) -> None:
    """ValueError unless there is, or can be, such a file, rather than after minutes."""
    if path is None or not torchrun.is_first():
        return
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"can't write {path}: is its folder there, and yours?")


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results to a file, if one is named, replacing it as a whole."""
    if path is not None and torchrun.is_first():
        whole_file.write(path, f"{json.dumps(results, indent=2)}\n".encode())
