"""Chapter 8's system: observers that play ahead while the agent learns.

An update takes one rollout from each of several observers, and the next ``max_lag``
updates are open to them as well. The schedule of a run says who played for which update
with which version of the weights; one process replays the run from it.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, cast

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor
from torch.futures import Future
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial import checks
from cdopt_tutorial.calls import Reference, alone, reference, remote
from cdopt_tutorial.calls.errors import WorkerSilent
from cdopt_tutorial.reinforce import system
from cdopt_tutorial.reinforce.agent import Agent, ReinforceConfig
from cdopt_tutorial.reinforce.agent import LocalPolicy as Talk
from cdopt_tutorial.reinforce.agent import Observer as Player
from cdopt_tutorial.reinforce.learner import Episodes, log_probs
from cdopt_tutorial.reinforce.system import learn
from cdopt_tutorial.rollouts.waiting import WAITS, Waiting
from cdopt_tutorial.run.worker import patience

Weights = dict[str, Tensor]
Schedule = list[dict[int, int]]  # for each update, by observer: its weights' version
# Between log-probabilities that two workers compute from the same weights. On one
# machine they agree; across code paths of a CPU they differed by at most 7e-7, but with
# weights of the next version by at least 0.2, over twenty updates.
ROUNDING = 1e-4


@dataclass(frozen=True)
class RolloutsConfig(ReinforceConfig):
    """Settings of a run; a ValueError if one is out of range, or no such device."""

    conversation: ClassVar[str] = "local-policy"  # type: ignore[misc]  # no field
    num_envs: int = 16  #: environments per observer, each with one episode per rollout
    max_lag: int = 1  #: updates that observers play ahead; 0 makes them wait for each
    #: rollouts per update, from different observers; by default one from each.
    num_rollouts: int | None = None
    #: cap on the ratio of an action's probability in the policy that learns to that in
    #: the policy that played; 0 leaves the ratio out.
    clip: float = 2.0
    step_ms: float = 0.0  #: ms that each step of an observer's environments waits
    waits: str = "fixed"  #: the waits: "fixed", or "heavy" with the same mean

    def __post_init__(self):
        super().__post_init__()
        checks.at_least(self, 0, "max_lag", "clip", "step_ms")
        checks.choices(self, waits=WAITS)
        if self.num_rollouts is None:
            object.__setattr__(self, "num_rollouts", self.num_observers)
        fits = 1 <= (self.num_rollouts or 0) <= self.num_observers
        checks.check(self, "num_rollouts", fits, "at least 1 and at most num_observers")

    def make_environments(self) -> VectorEnv:
        """An observer's environments, whose steps may wait."""
        environments = super().make_environments()
        if not self.step_ms:
            return environments
        return Waiting(environments, self.step_ms, self.waits)


@dataclass(frozen=True)
class Rollout(Episodes):
    """Episodes that an observer hands over, and what it says of the policy in them."""

    observer: int  #: its number
    number: int  #: of rollouts that this observer has played before
    version: int  #: of the weights
    log_probs: Tensor  #: (steps,), of the actions, in the policy that played


class Observer(Player):
    """Plays one rollout after another in environments of its own."""

    _talk: Talk  # the only conversation of the config

    def __init__(self, number: int, config: RolloutsConfig):
        super().__init__(number, config)
        self._number, self._played = number, 0

    def play(self, version: int, weights: Weights) -> Rollout:
        """Play one episode in each environment with these weights."""
        actor = self._talk.actor
        actor.policy.load_state_dict(weights)
        episodes = actor.episodes(*self.play_episodes())
        before, self._played = self._played, self._played + 1
        with torch.no_grad():  # of the policy as it is, not as it should be
            chances = log_probs(actor.policy, episodes)
        parts = *vars(episodes).values(), self._number, before, version, chances
        return Rollout(*parts)

    def play_ahead(self, agent_rref: Reference) -> None:
        """Play until there is no further update; called by the agent, once."""
        agent = agent_rref.rpc_sync(timeout=0)  # it answers once an update is open
        while given := agent.begin(self._number):
            update, version, weights = given
            agent.hand_over(update, self.play(version, weights))


class Learner(Agent):
    """Chapter 1's agent, which keeps the last few versions of its weights."""

    config: RolloutsConfig

    def __init__(self, config: RolloutsConfig):
        super().__init__(config)
        self.version = 0  #: updates so far
        self.schedule: Schedule = []  #: of the updates so far
        #: by version, as far back as an observer may lag: copies, which never change.
        self.kept: dict[int, Weights] = {0: self.weights()}
        self._old = deepcopy(self.policy)
        self._played: Counter[int] = Counter()

    def finish_episode(self, batch: Sequence[Rollout]) -> tuple[int, float]:  # type: ignore[override]  # rollouts only
        """Make an update, one step of Adam, and return the largest lag and ratio.

        A ratio is an action's probability in the policy that learns over that in the
        policy that played. A RuntimeError names a rollout whose claims are false.
        """
        for rollout in batch:
            self._check(rollout)
        ratios = torch.cat([self._ratios(rollout) for rollout in batch])
        clip = self.config.clip
        super().finish_episode(batch, ratios.clamp(max=clip) if clip else None)
        played = {rollout.observer: rollout.version for rollout in batch}
        lag = self.version - min(played.values())
        self._played.update(played.keys())
        self.schedule.append(played)
        self.version += 1
        self.kept[self.version] = self.weights()
        self.kept.pop(self.version - self.config.max_lag - 1, None)
        return lag, ratios.max().item()

    @torch.no_grad()
    def _check(self, rollout: Rollout) -> None:
        """Refuse one that is too old, played by other weights, or out of turn."""
        what = f"a rollout of observer{rollout.observer} for update {self.version}"
        version, weights = rollout.version, self.kept.get(rollout.version)
        if weights is None:
            known = f"only {min(self.kept)} to {max(self.kept)} are known"
            raise RuntimeError(f"{what} is of version {version}, but {known}")
        self._old.load_state_dict(weights)
        gap = (log_probs(self._old, rollout) - rollout.log_probs).abs().max().item()
        if not gap <= ROUNDING:
            wrong = f"was not played by the weights of version {version}"
            raise RuntimeError(f"{what} {wrong}: log-probabilities differ by {gap:.1g}")
        expected = self._played[rollout.observer]
        if rollout.number != expected:
            lost = f"is its number {rollout.number}, but {expected} was expected"
            raise RuntimeError(f"{what} {lost}: one was lost, or came twice")

    @torch.no_grad()
    def _ratios(self, rollout: Rollout) -> Tensor:
        # For each rollout alone, as its observer did: the same shapes give the same
        # bits, so that the same weights give exactly 1.
        return (log_probs(self.policy, rollout) - rollout.log_probs).exp()


@dataclass(frozen=True)
class Training(system.Training):
    """What a run returns; each of its rounds is an update."""

    schedule: Schedule  #: of the updates

    @property
    def lags(self) -> Counter[int]:
        """How many rollouts had each lag."""
        pairs = enumerate(self.schedule)
        return Counter(u - version for u, row in pairs for version in row.values())

    def figures(self) -> dict[str, Any]:
        """What the command writes; times in seconds."""
        return super().figures() | {
            "lag": {str(lag): n for lag, n in sorted(self.lags.items())},
            "max_ratio": max(update.max_ratio for update in self.rounds),
            "schedule": self.schedule,
        }


class AheadAgent(Learner):
    """Learns from rollouts as they arrive, and opens updates for more of them."""

    def __init__(self, config: RolloutsConfig):
        super().__init__(config)
        self._calls: list[Future] = []  # of play_ahead
        # Replaced as a pair: no version is seen with the weights of another.
        self._newest = 0, self.kept[0]
        self._changed = threading.Condition()
        # By update and by the observer that plays for it: the rollout, or None so far.
        self._open: dict[int, dict[int, Rollout | None]] = {}
        self._last: dict[int, int] = {}  # by observer, the update that it got last
        self._asking: dict[int, Future] = {}
        self._error: Exception | None = None  # of an observer that failed
        self._over = False

    def begin(self, observer: int) -> Future:
        """An update to play for, a version, and its weights; called by an observer.

        The future completes once an update is open, or with None after the last.
        """
        future: Future = Future()
        with self._changed:
            self._asking[observer] = future
        self._answer()
        return future

    def hand_over(self, update: int, rollout: Rollout) -> None:
        """Take a rollout that was played for this update; called by its observer."""
        with self._changed:
            self._open[update][rollout.observer] = rollout
            self._changed.notify()

    def batches(self, observers: Sequence[Reference]) -> Iterator[list[Rollout]]:
        """Have observers play: the rollouts of each update, in the observers' order."""
        for observer in observers:
            # Without a limit: it plays to the end of the run.
            call = observer.rpc_async(timeout=0).play_ahead(reference(self))
            self._calls.append(call)
            call.add_done_callback(self.note_failure)
        while True:
            yield self.next_batch()

    def next_batch(self) -> list[Rollout]:
        """Wait for the rollouts of the next update; an observer's error is raised."""
        seconds = patience()
        with self._changed:
            come = self._changed.wait_for(
                lambda: self._error or self.is_complete(), seconds
            )
            if self._error:
                raise self._error
            row = self._open.get(self.version, {})
            if not come:
                all_of_them = range(self.config.num_observers)
                missing = [n for n in all_of_them if row.get(n) is None]
                late = min(missing, key=lambda n: n not in row)  # whose turn it is
                reason = f"did not hand over a rollout within {seconds:g} s"
                raise WorkerSilent(f"observer{late}", reason)
            return [rollout for _, rollout in sorted(row.items()) if rollout]

    def finish_episode(self, batch: Sequence[Rollout]) -> tuple[int, float]:  # type: ignore[override]  # as above
        """Make an update, and open another one."""
        lag_and_ratio = super().finish_episode(batch)
        with self._changed:  # not before, or this update would be open again
            del self._open[self.version - 1]
            self._newest = self.version, self.kept[self.version]
        self._answer()
        return lag_and_ratio

    def end(self) -> None:
        """End the run: wait until all observers have finished their last rollouts."""
        with self._changed:
            self._over = True
        self._answer()
        for call in self._calls:
            call.wait()

    def note_failure(self, call: Future) -> None:
        """An observer has ended; if it failed, so does the run."""
        try:
            call.value()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify()

    def is_complete(self) -> bool:
        """Whether all rollouts of the next update have arrived."""
        row = self._open.get(self.version, {})
        return len(row) == self.config.num_rollouts and None not in row.values()

    def _answer(self) -> None:
        """Answer the observers that wait for an update, where one is open to them."""
        with self._changed:
            ready = []
            for observer in list(self._asking):
                update = self._update_for(observer)
                if update is not None:
                    self._open.setdefault(update, {})[observer] = None
                    self._last[observer] = update
                if self._over or update is not None:
                    answer = None if self._over else (update, *self._newest)
                    ready.append((self._asking.pop(observer), answer))
        for future, answer in ready:
            future.set_result(answer)

    def _update_for(self, observer: int) -> int | None:
        """The next update that it has not had and that lacks observers."""
        version, _ = self._newest
        first = max(version, self._last.get(observer, -1) + 1)
        for update in range(first, version + self.config.max_lag + 1):
            if len(self._open.get(update, {})) != self.config.num_rollouts:
                return update
        return None


def train(config: RolloutsConfig) -> Training:
    """The agent's role: have observers play ahead, and learn until solved."""
    agent = AheadAgent(config)
    observers = [
        remote(f"observer{number}", Observer, number, config)
        for number in range(config.num_observers)
    ]
    training = learn(agent, agent.batches(observers))
    agent.end()
    return Training(**vars(training), schedule=agent.schedule)


def run(config: RolloutsConfig, **options: Any) -> Training:
    """Train on workers, as :func:`~cdopt_tutorial.reinforce.system.run` does."""
    return cast(Training, system.run(config, train, **options))


def in_step(config: RolloutsConfig) -> Iterator[dict[int, int]]:
    """The endless schedule of observers that wait for every update and take turns."""
    number = config.num_rollouts or config.num_observers
    for update in count():
        turns = range(update * number, (update + 1) * number)
        yield {turn % config.num_observers: update for turn in turns}


def run_locally(
    config: RolloutsConfig, schedule: Iterable[dict[int, int]] | None = None
) -> Training:
    """Train in this process by the schedule of a run or, without one, in step.

    It computes with one thread, as each worker does, so that the bits are the same. A
    ValueError names an update that no run of this config can have.
    """
    with alone(), set_torch_threads(1):
        return train_alone(replace(config, step_ms=0.0), schedule)


def train_alone(
    config: RolloutsConfig, schedule: Iterable[dict[int, int]] | None = None
) -> Training:
    """The role of one process that plays all parts, and waits for its environments."""
    learner = Learner(config)
    observers = {n: Observer(n, config) for n in range(config.num_observers)}
    rows = in_step(config) if schedule is None else schedule
    training = learn(learner, replay(learner, rows, observers))
    return Training(**vars(training), schedule=learner.schedule)


def replay(
    learner: Learner, schedule: Iterable[dict[int, int]], observers: dict[int, Observer]
) -> Iterator[list[Rollout]]:
    """The rollouts of a schedule, each played here when it is learned from."""
    for row in schedule:
        _check_row(learner.config, learner.version, row)
        yield [observers[n].play(v, learner.kept[v]) for n, v in sorted(row.items())]


def _check_row(config: RolloutsConfig, update: int, row: dict[int, int]) -> None:
    known, oldest = range(config.num_observers), max(0, update - config.max_lag)
    fits = len(row) == config.num_rollouts and all(number in known for number in row)
    if not fits or not all(oldest <= version <= update for version in row.values()):
        raise ValueError(
            f"update {update} was played by {row}, but needs {config.num_rollouts} of "
            f"{config.num_observers} observers, with versions from {oldest} to {update}"
        )
