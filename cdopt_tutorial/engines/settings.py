"""What the parent tells all workers of a run, and the run's own files."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What all workers of a run need to know to join it; see ``launch``."""

    world_size: int
    folder: str  # the run's own, which only this user can read
    rpc_timeout: float
    rpc_threads: int
    polling: bool
    modules: tuple[str, ...]  # what any role needs; every worker imports it first
    traced: bool
    counted: bool

    def path(self, worker: str, kind: str) -> str:
        """A worker's file: its "role", its "pace", or the "log" of its libraries."""
        return os.path.join(self.folder, f"{worker}.{kind}")

    def meeting(self, name: str) -> str:
        """Where a group of this name meets: a file, so no port is opened for it."""
        return f"file://{self.folder}/{name}"
