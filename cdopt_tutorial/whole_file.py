"""Files written as a whole: a reader finds what was there before, or all of the new."""

import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file beside its place, then put it there; OSError if that can't be.

    A link goes on to lead to the file. A stream takes the content as it is.
    """
    if is_stream(path):
        path.write_bytes(content)
        return
    beside = _beside(path)
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path.resolve())
    finally:
        beside.unlink(missing_ok=True)


def attempt(path: Path) -> None:
    """Raise the OSError that `write` would, and leave what is there as it is."""
    if is_stream(path):
        return
    beside = _beside(path)
    try:
        beside.write_bytes(b"one byte")
    finally:
        beside.unlink(missing_ok=True)
    if path.exists():
        path.open("a").close()


def is_stream(path: Path) -> bool:
    """Whether it is a pipe or a device, which no file may replace."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _beside(path: Path) -> Path:
    path = path.resolve()
    return path.with_name(f".{path.name}.{os.getpid()}")
