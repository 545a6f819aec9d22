"""A worker of each role, killed at some moment, is named, and no process is left."""

import re
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import psutil
import pytest
from hosts import PATIENCE, kill, runs, tree, wait_until
from running import COMMAND, wait_for_end

#: What carries calls, what is trained without end, and its workers, who call each
#: other, meet in collectives, or both; `test_ray` and `test_torchrun` kill those of the
#: other system.
RUNS = [
    ("rpc", "reinforce --lr 1e-9 --max-episodes 10000000", "agent observer0 observer1"),
    ("rpc", "shard --max-steps 1000000 --width 16 --seq-len 8", "rank0 rank1"),
    ("ray", "hybrid --epochs 1000000", "trainer0 trainer1 master ps"),
]
#: What is said of a worker that was killed.
SAID = {"rpc": "was killed by SIGKILL|could not be started", "ray": "died"}
PAUSE = 1.5  # seconds by which the next one is killed later: as they join, or train


class Run:
    """A run under way, and the processes that it has had."""

    def __init__(self, engine: str, system: str, names: list[str]):
        self._engine, self._names = engine, names
        command = [*COMMAND, *system.split(), "--engine", engine]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._command = subprocess.Popen(command, **pipes)
        self._seen, self._named = set[psutil.Process](), dict[str, psutil.Process]()

    def all_are_there(self) -> bool:
        self._seen |= set(tree([self._command]))
        for process, name in product(filter(runs, self._seen), self._names):
            with suppress(psutil.NoSuchProcess, OSError):  # it has just ended
                if self._is(process, name):
                    self._named[name] = process  # Ray's may later lose that thread
        return len(self._named) == len(self._names)

    def _is(self, process: psutil.Process, name: str) -> bool:
        if self._engine == "rpc":
            return process.name() == name
        if "RayWorker" not in process.name():
            return False
        # The thread that hands on its messages has its worker's name.
        threads = Path(f"/proc/{process.pid}/task").glob("*/comm")
        return name in (each.read_text().strip() for each in threads)

    def lose(self, name: str, moment: float) -> tuple[int, str]:
        """Kill a worker so many seconds after all are there: exit code and output."""
        try:
            wait_until(self.all_are_there)
            time.sleep(moment)
            self._named[name].kill()
            output, _ = self._command.communicate(timeout=PATIENCE)
            wait_for_end(self._seen)
        finally:
            kill([self._command])
        return self._command.returncode, output


@pytest.mark.engines
@pytest.mark.parametrize("engine, system, workers", RUNS)
def test_a_worker_that_is_killed_at_any_moment_is_named(engine, system, workers):
    if engine == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    names = workers.split()
    of_each_role = {name.strip("01"): name for name in names}.values()
    for number, name in enumerate(of_each_role):
        code, output = Run(engine, system, names).lose(name, PAUSE * number)
        line = f"^cdopt-tutorial: {name} ({SAID[engine]})"
        assert code == 1 and re.search(line, output, re.M), output
