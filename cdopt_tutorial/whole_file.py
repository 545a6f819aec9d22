"""Files replaced as a whole: a reader finds the old content or the new one."""

import os
import threading
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file beside the old one, then replace that; OSError if impossible.

    Symbolic links are followed, and pipes and devices are written to directly.
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
    """Raise the OSError that `write` would, without changing the file."""
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
    """Whether it is a pipe or a device, which must not be replaced."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _beside(path: Path) -> Path:
    path = path.resolve()
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
