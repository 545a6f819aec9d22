"""Environments in a process of their own, like a robot or a game server.

Whoever steps them waits at a socket for the answer and leaves the core free. The file
is run by its path and imports no torch, so that many simulators start quickly.
"""

import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

import gymnasium
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

WAITS = ("fixed", "heavy")
SHAPE = 1.5  # of the heavy waits' Pareto distribution, whose variance is infinite


class Simulator:
    """Vectorized environments in another process, which ends with this one.

    Each ``step`` takes ``step_ms`` milliseconds longer; ``np_random`` can only be set.
    """

    def __init__(self, environment: str, num_envs: int, step_ms: float, waits: str):
        self.num_envs = num_envs
        self._connection, theirs = Pipe()  # a pair of sockets
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._connection.send((environment, num_envs, step_ms, waits))

    def reset(self) -> tuple[NDArray, dict]:
        """First states (n, 4), and the environments' info."""
        return self._call("reset")

    def step(self, actions: NDArray) -> tuple:
        """What the environments' own ``step`` returns."""
        return self._call("step", actions)

    def close(self) -> None:
        """End the simulator."""
        self._connection.close()
        self._process.wait()

    def _set_random(self, generator: Generator) -> None:
        # Unanswered, so that nobody waits while the simulator starts.
        self._connection.send(("np_random", generator))

    np_random = property(fset=_set_random, doc="The random stream of all environments.")

    def _call(self, *request: Any) -> Any:
        self._connection.send(request)
        return self._connection.recv()


def serve(connection: Connection) -> None:
    """Be the simulator until the other end closes the connection."""
    environment, num_envs, step_ms, waits = connection.recv()
    environments = gymnasium.make_vec(environment, num_envs, "vector_entry_point")
    clock = default_rng(0)
    while True:
        match connection.recv():
            case "np_random", generator:
                environments.np_random = generator
                # Each simulator has its own waits, which draw nothing from the stream.
                (clock,) = generator.spawn(1)
            case ("reset",):
                connection.send(environments.reset())
            case "step", actions:
                moved = environments.step(actions)
                time.sleep(wait_ms(step_ms, waits, clock) / 1000)
                connection.send(moved)


def wait_ms(step_ms: float, waits: str, clock: Generator) -> float:
    """Milliseconds that the next step waits."""
    if waits == "fixed":
        return step_ms
    least = step_ms * (SHAPE - 1) / SHAPE  # so that the mean is step_ms
    return least * (1 + clock.pareto(SHAPE))


if __name__ == "__main__":
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # its owner is gone
