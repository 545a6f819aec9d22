"""What the parent tells all workers of a run, and the run's own files."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What all workers of a run need to know to join it.

    Attributes:
        world_size: number of workers.
        folder: the run's own directory, which only this user can read.
        rpc_timeout: seconds until an unanswered call fails.
        rpc_threads: threads that answer calls.
        polling: whether idle workers poll shared memory for messages.
        modules: what any of the roles needs; every worker imports it first.
        traced: whether to record every call.
        counted: whether to count what the sockets receive.
    """

    world_size: int
    folder: str
    rpc_timeout: float
    rpc_threads: int
    polling: bool
    modules: tuple[str, ...]
    traced: bool
    counted: bool

    def path(self, worker: str, kind: str) -> str:
        """A worker's file: its "role", its "pace", or the "log" of its libraries."""
        return os.path.join(self.folder, f"{worker}.{kind}")

    def meeting(self, name: str) -> str:
        """Where a group of this name meets: a file, so no port is opened for it."""
        return f"file://{self.folder}/{name}"
