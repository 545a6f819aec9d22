"""Whatever a run creates is closed to all other users."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from running import NOT_ROOT, endless, wait_for_end

SHARED = "/dev/shm", "/tmp/ray"
INTRUDER = 65533

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
]


def within_reach(*folders: str | Path) -> set[str]:
    """What an intruder can read, write or enter below these folders."""
    # The target of a link is found in its own place.
    kinds = "-readable -o -writable -o -executable".split()
    command = ["find", *folders, *"-mindepth 1 -not -type l (".split(), *kinds, ")"]
    intruder = {"user": INTRUDER, "group": INTRUDER, "extra_groups": []}
    done = subprocess.run(command, capture_output=True, text=True, **intruder)
    return set(done.stdout.splitlines())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder like /tmp: everybody may enter it and create files in it."""
    with TemporaryDirectory() as made:  # pytest's own is closed
        os.chmod(made, 0o1777)
        yield Path(made)


@pytest.mark.parametrize("how", [[], NOT_ROOT], ids=["root", "not root"])
@pytest.mark.parametrize("engine", ["rpc", "ray"])
def test_nothing_of_a_run_is_within_reach(engine, how, folder):
    before = within_reach(*SHARED)
    (control := folder / "open").touch(0o644)
    with endless(engine, folder, *how) as (running, below):
        found = within_reach(folder, *SHARED) - before
        running.terminate()
        wait_for_end(below)
    # But for torch's own cache, which is empty.
    found = {each for each in found if "/torchinductor_" not in each}
    assert found == {str(control)}
