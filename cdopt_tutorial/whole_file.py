"""Files replaced as a whole: a reader finds the old content or the new one."""

import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file beside the old one, then replace that; OSError if impossible.

    Symbolic links are followed, and pipes and devices are written to directly.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
