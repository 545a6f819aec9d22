"""The subcommands, of the book and of the systems, and what they share."""

import io
import json
import os
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import DisallowNone

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
_FRAME = re.compile(r"\x1b\[[\d;]*m|[╭╮│─]|---+")  # and colors


class Failed(Exception):
    """The run failed; the message says how, in one line."""


def read_flags(name: str, flags: type, arguments: list[str]) -> Any:
    """The flags of a command, from the fields of a dataclass; exits after ``--help``.

    A ValueError has the first paragraph of what tyro says of a bad flag, in a frame.
    """
    said, program = io.StringIO(), f"cdopt-tutorial {name}"
    try:
        with redirect_stderr(said):
            return tyro.cli(
                flags, prog=program, description=COMMANDS[name], args=arguments,
                config=(DisallowNone,),
            )  # fmt: skip
    except SystemExit as end:
        if not end.code:
            raise
        _, _, text = _FRAME.sub("", said.getvalue()).partition("\n")
        why, *_ = re.split(r"\n\s*\n", text.strip())
        raise ValueError(f"{' '.join(why.split())} (see {program} --help)") from end


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
