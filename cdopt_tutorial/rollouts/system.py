"""Chapter 8's system: observers that play ahead while the agent learns.

Each update of the agent takes one rollout from each of several observers. The next
``max_lag`` updates are open to them as well, so that nobody waits for a slow observer
at once, and no rollout is older than that. Who played for which update by weights of
which version is the schedule of a run, from which one process repeats it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from torch.futures import Future
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial import checks
from cdopt_tutorial.engines import Role, serve
from cdopt_tutorial.engines.one_process import OneProcess
from cdopt_tutorial.engines.seam.reference import Reference
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.watch.errors import WorkerLost
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.steady import Lost
from cdopt_tutorial.reinforce.system import EPISODE, Round, Score
from cdopt_tutorial.rollouts.learner import (
    Learner,
    Observer,
    Rollout,
    RolloutsConfig,
    Weights,
)

Schedule = list[dict[int, int]]  # for each update, by observer: its weights' version


@dataclass(frozen=True)
class Update(Round):
    """What the agent reports after each update."""

    lag: int  #: of its oldest rollout: updates since the weights that played it
    max_ratio: float  #: the largest ratio of probabilities, before it is clipped


@dataclass(frozen=True)
class Training:
    """What a run returns."""

    score: Score  #: rewards and verdict
    updates: list[Update]  #: what the agent reported after each update
    schedule: Schedule  #: of these updates
    weights: Weights  #: the trained policy's parameters, on the CPU

    @property
    def lags(self) -> Counter[int]:
        """How many rollouts had which lag."""
        pairs = enumerate(self.schedule)
        return Counter(u - version for u, row in pairs for version in row.values())

    def as_json(self) -> dict[str, Any]:
        """What the command line writes; times in seconds."""
        return {
            "solved": self.score.solved,
            "episodes": len(self.score.rewards),
            "seconds": self.score.seconds,
            "env_steps": self.score.env_steps,
            "lag": {str(lag): n for lag, n in sorted(self.lags.items())},
            "max_ratio": max(update.max_ratio for update in self.updates),
            "schedule": self.schedule,
        }


class AheadAgent(Learner):
    """Learns from rollouts as they come in, and opens updates for more of them."""

    def __init__(self, config: RolloutsConfig):
        super().__init__(config)
        # Replaced as one: nobody sees the weights of one version with another's number.
        self._newest = 0, self.kept[0]
        self._changed = threading.Condition()
        #: by update, by observer who plays for it: the rollout, or None so far
        self._open: dict[int, dict[int, Rollout | None]] = {}
        self._last: dict[int, int] = {}  # by observer, the update that it was given
        self._waiting: dict[int, Future] = {}
        self._lost: list[tuple[int, Exception]] = []
        self._over = False

    def begin(self, observer: int) -> Future:
        """The update for which an observer is to play, a version, and its weights.

        Answered once there is one, or with None after the last. Called by the observer.
        """
        with self._changed:
            self._waiting[observer] = future = Future()
        self._answer()
        return future

    def hand_over(self, update: int, observer: int, rollout: Rollout) -> None:
        """Take a rollout from the observer that has played it for this update."""
        with self._changed:
            self._open[update][observer] = rollout
            self._changed.notify()

    def leave(self, observer: int, call: Future) -> None:
        """An observer has ended; a lost one leaves its open updates to others."""
        try:
            call.value()
        except Exception as error:
            with self._changed:
                for row in self._open.values():
                    if observer in row and row[observer] is None:
                        del row[observer]
                self._waiting.pop(observer, None)
                self._lost.append((observer, error))
                self._changed.notify()
            self._answer()

    def next_batch(self, on_lost: Callable) -> dict[int, Rollout]:
        """Wait for the rollouts of the next update; by observer.

        Calls ``on_lost(observer, error)`` for each that has been lost meanwhile.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lost or self._is_complete())
                lost, self._lost = self._lost, []
                if not lost:
                    return dict(sorted(self._open[self.version].items()))
            for each in lost:
                on_lost(*each)

    def learn(self, batch: dict[int, Rollout]) -> tuple[int, float]:
        """Make an update, and open another one."""
        found = self.update(batch)
        with self._changed:  # not before, or the update would be open once more
            del self._open[self.version - 1]
            self._newest = self.version, self.kept[self.version]
        self._answer()
        return found

    def end(self) -> None:
        """No update is to come: observers end once they have played."""
        with self._changed:
            self._over = True
        self._answer()

    def _is_complete(self) -> bool:
        row = self._open.get(self.version, {})
        return len(row) == self.config.num_rollouts and None not in row.values()

    def _answer(self) -> None:
        """Answer those who wait for an update, if one is open to them."""
        with self._changed:
            ready = []
            for observer in list(self._waiting):
                update = self._update_for(observer)
                if update is not None:
                    self._open.setdefault(update, {})[observer] = None
                    self._last[observer] = update
                if self._over or update is not None:
                    answer = None if self._over else (update, *self._newest)
                    ready.append((self._waiting.pop(observer), answer))
        for future, answer in ready:
            future.set_result(answer)

    def _update_for(self, observer: int) -> int | None:
        """The next update that it has not had, for which too few observers play."""
        version, _ = self._newest
        first = max(version, self._last.get(observer, -1) + 1)
        for update in range(first, version + self.config.max_lag + 1):
            if len(self._open.get(update, {})) < self.config.num_rollouts:
                return update
        return None


class Record:
    """What has come out of a run's updates so far."""

    def __init__(self, config: RolloutsConfig):
        self._config, self.score = config, Score()
        self.updates, self.schedule = [], []

    def goes_on(self) -> bool:
        """Whether another update is to be made."""
        most = self._config.max_episodes
        return not self.score.solved and len(self.score.rewards) < most

    def add(self, batch: dict[int, Rollout], found: tuple[int, float]) -> Update:
        """Count an update, with the largest lag and ratio that it found."""
        so_far = self.score.add([rollout.episodes for rollout in batch.values()])
        self.schedule.append({n: rollout.version for n, rollout in batch.items()})
        self.updates.append(Update(*astuple(so_far), *found))
        return self.updates[-1]

    def training(self, weights: Weights) -> Training:
        """What the run returns, with the weights that it has learned."""
        return Training(self.score, self.updates, self.schedule, weights)


def train(engine: Workers, config: RolloutsConfig) -> Training:
    """The agent's role: have observers play ahead, and learn until it is solved."""
    agent, calls = AheadAgent(config), {}
    agent_rref = engine.reference(agent)

    def start(number: int, observer: Reference) -> None:
        call = observer.rpc_async(timeout=0).play_ahead(agent_rref)
        call.add_done_callback(partial(agent.leave, number))
        calls[number % config.num_observers] = call

    def make(number: int) -> Reference:
        worker = f"observer{number % config.num_observers}"
        return engine.remote(worker, Observer, number, config)

    def start_another(number: int, error: Exception) -> None:
        if not (engine.replaces and isinstance(error, WorkerLost)):
            raise error
        engine.report("agent", Lost(f"observer{number}", agent.version))
        number += config.num_observers  # whose random streams nobody has drawn from
        start(number, make(number))

    observers = {number: make(number) for number in range(config.num_observers)}
    record = Record(config)  # its time begins when all observers are there
    for number, observer in observers.items():
        start(number, observer)
    while record.goes_on():
        batch = agent.next_batch(start_another)
        engine.report("agent", record.add(batch, agent.learn(batch)))
    agent.end()
    for call in calls.values():
        with suppress(*([WorkerLost] if engine.replaces else [])):
            call.wait()  # whoever is lost now is not needed any more
    return record.training(agent.kept[agent.version])


def check(config: RolloutsConfig) -> None:
    """A ValueError if this machine has no memory for the workers, or their episodes."""
    checks.workers(config, "num_observers", others=1)
    number = config.num_observers * config.num_envs * (config.max_lag + 1)
    checks.in_memory(f"rollouts of {number} environments", number * EPISODE)


def run(
    config: RolloutsConfig, engine: Workers | None = None, **options: Any
) -> Training:
    """Train on workers: an agent and its observers, each in a process of its own.

    The options are those of :func:`~.launch.launch`. A ValueError where
    :func:`check` refuses the config, a WorkerError if a worker failed.
    """
    check(config)
    engine = engine or TorchRPC()
    roles = {"agent": Role(train, (engine, config))}
    observer = Role(serve, replaceable=True)
    roles |= {f"observer{i}": observer for i in range(config.num_observers)}
    options.setdefault("rpc_threads", 2)
    return engine.launch(roles, **options)["agent"]


def in_step(config: RolloutsConfig) -> Iterator[dict[int, int]]:
    """The schedule of those who wait for every update, and take turns; without end."""
    for update in count():
        first = update * config.num_rollouts
        turns = range(first, first + config.num_rollouts)
        yield {turn % config.num_observers: update for turn in turns}


def run_locally(
    config: RolloutsConfig,
    schedule: Iterable[dict[int, int]] | None = None,
    on_report: Callable[[str, Update], None] | None = None,
) -> Training:
    """Train in this process by the schedule of a run, or without one, in step.

    It computes with one thread, as each worker does, or the bits would be others. A
    ValueError names an entry that no run of this config can have.
    """
    engine, config = OneProcess(on_report), replace(config, step_ms=0.0)
    schedule = in_step(config) if schedule is None else schedule
    with set_torch_threads(1):
        learner, record = Learner(config), Record(config)
        observers: dict[int, Observer] = {}
        for row in schedule:
            if not record.goes_on():
                break
            _check_row(config, learner.version, row)
            batch = {}
            for number, version in sorted(row.items()):
                if number not in observers:
                    observers[number] = Observer(number, config)
                batch[number] = observers[number].play(version, learner.kept[version])
            engine.report("agent", record.add(batch, learner.update(batch)))
        return record.training(learner.kept[learner.version])


def _check_row(config: RolloutsConfig, update: int, row: dict[int, int]) -> None:
    most, least = update, max(0, update - config.max_lag)
    for number, version in row.items():
        if not least <= version <= most:
            allowed = f"but must be from {least} to {most}"
            what = f"update {update}: observer{number} played by version {version}"
            raise ValueError(f"{what}, {allowed}")
    if len(row) != config.num_rollouts:
        needed = f"but num_rollouts is {config.num_rollouts}"
        raise ValueError(f"update {update} has {len(row)} rollouts, {needed}")
