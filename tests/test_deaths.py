"""A worker of each role, killed at some moment, is named, and no process is left."""

import json
import math
import re
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import psutil
import pytest
from hosts import PATIENCE, kill, runs, tree
from running import COMMAND, wait_for_end

#: What carries calls, what is trained, and its workers, who call each other, meet in
#: collectives, or both; `test_ray` and `test_torchrun` kill those of the other system.
RUNS = [
    ("rpc", "reinforce --lr 1e-4 --max-episodes 3000", "agent observer0 observer1"),
    ("rpc", "shard --max-steps 50 --width 16 --seq-len 8", "rank0 rank1"),
    ("ray", "hybrid --max-steps 100", "trainer0 trainer1 master ps"),
]
#: What is said of a worker that was killed.
SAID = {"rpc": "was killed by SIGKILL|could not be started", "ray": "died"}
TOLERANCE = 1e-10  # of a result, against one process
GLANCE = 0.2  # seconds between two looks


class Run:
    """A run under way, and the processes that it has had."""

    def __init__(self, engine: str, system: str, names: list[str], file: Path):
        self._engine, self._names = engine, names
        more = ["--against-local", "--engine", engine, "--json", file]
        command = [*COMMAND, *system.split(), *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._command = subprocess.Popen(command, **pipes)
        self._seen, self._named = set[psutil.Process](), dict[str, psutil.Process]()
        self.begin, self.last = math.inf, -math.inf  # when all workers were there

    def workers(self) -> dict[str, psutil.Process]:
        """Its workers by their names, as far as there are any."""
        self._seen |= set(tree([self._command]))
        for process, name in product(filter(runs, self._seen), self._names):
            with suppress(psutil.NoSuchProcess, OSError):  # it has just ended
                if self._is(process, name):
                    self._named[name] = process  # Ray's may later lose that thread
        return {name: each for name, each in self._named.items() if runs(each)}

    def _is(self, process: psutil.Process, name: str) -> bool:
        if self._engine == "rpc":
            return process.name() == name
        if "RayWorker" not in process.name():
            return False
        # The thread that hands on its messages has its worker's name.
        threads = Path(f"/proc/{process.pid}/task").glob("*/comm")
        return name in (each.read_text().strip() for each in threads)

    def lose(self, name: str, moment: float) -> bool:
        """Kill a worker so many seconds after all are there; False if too late."""
        limit = time.monotonic() + 2 * PATIENCE
        while self._command.poll() is None and time.monotonic() < limit:
            found = self.workers()
            if len(found) == len(self._names):
                self.last = time.monotonic()
                self.begin = min(self.begin, self.last)
            if time.monotonic() - self.begin >= moment and name in found:
                found[name].kill()
                return True
            time.sleep(GLANCE)
        return False

    def end(self) -> tuple[int, str]:
        """Its exit code and output, once nothing of it is left."""
        try:
            output, _ = self._command.communicate(timeout=PATIENCE)
            wait_for_end(self._seen)
        finally:
            kill([self._command])
        return self._command.returncode, output


def take_right(file: Path) -> None:
    """Remove a result, which must be that of one process."""
    found = json.loads(file.read_text())
    file.unlink()
    assert found["max_parameter_difference"] <= TOLERANCE


@pytest.mark.engines
@pytest.mark.parametrize("engine, system, workers", RUNS)
def test_a_worker_that_is_killed_at_any_moment_is_named(
    engine, system, workers, tmp_path
):
    if engine == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    file, names = tmp_path / "found.json", workers.split()
    whole = Run(engine, system, names, file)
    whole.lose("", math.inf)
    length = whole.last - whole.begin
    _, output = whole.end()
    assert length > 0 and file.exists(), output
    take_right(file)
    of_each_role = {name.strip("01"): name for name in names}.values()
    for number, name in enumerate(of_each_role):
        moment, killed = length * number / len(of_each_role), False
        while not killed:
            run = Run(engine, system, names, file)
            killed = run.lose(name, moment)
            code, output = run.end()
            if file.exists():  # the run was over before, or nearly so
                take_right(file)
            else:
                line = f"^cdopt-tutorial: {name} ({SAID[engine]})"
                assert code == 1 and re.search(line, output, re.M), output
            moment /= 2
