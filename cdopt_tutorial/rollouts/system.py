"""Chapter 8's system: observers that play ahead while the agent learns.

An update takes one rollout from each observer, and the next ``max_lag`` updates are
open to them as well. The schedule of a run says who played for which update
with which version of the weights; one process replays the run from it.
"""

import threading
from collections import Counter, defaultdict
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
    #: cap on the ratio of an action's probability in the policy that learns to that in
    #: the policy that played; 0 leaves the ratio out.
    clip: float = 2.0
    step_ms: float = 0.0  #: ms that each step of an observer's environments waits
    waits: str = "fixed"  #: the waits: "fixed", or "heavy" with the same mean

    def __post_init__(self):
        super().__post_init__()
        checks.at_least(self, 0, "max_lag", "clip", "step_ms")
        checks.choices(self, waits=WAITS)

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
        with torch.no_grad():  # of the policy as it is, not as it should be
            chances = log_probs(actor.policy, episodes)
        parts = *vars(episodes).values(), self._number, self._played, version, chances
        self._played += 1
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
        self.schedule.append({of.observer: of.version for of in batch})
        lag = self.version - min(self.schedule[-1].values())
        self.version += 1
        self.kept[self.version] = self.weights()
        self.kept.pop(self.version - self.config.max_lag - 1, None)
        return lag, ratios.max().item()

    @torch.no_grad()
    def _check(self, rollout: Rollout) -> None:
        """Refuse one that is too old, played by other weights, or out of turn."""
        what = f"a rollout of observer{rollout.observer} for update {self.version}"
        version, number = rollout.version, rollout.number
        if version not in self.kept:
            raise RuntimeError(
                f"{what} is of version {version}, but only {[*self.kept]} are known"
            )
        self._old.load_state_dict(self.kept[version])
        gap = (log_probs(self._old, rollout) - rollout.log_probs).abs().max().item()
        if not gap <= ROUNDING:
            raise RuntimeError(
                f"{what} was not played by the weights of version {version}: "
                f"log-probabilities differ by {gap:.1g}"
            )
        if number != self.version:  # it plays one for each update
            raise RuntimeError(
                f"{what} is its number {number}, but {self.version} was expected: one "
                "was lost, or came twice"
            )

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
        # By update and by observer, what has come.
        self._come: defaultdict[int, dict[int, Rollout]] = defaultdict(dict)
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
            self._come[update][rollout.observer] = rollout
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
        seconds, version, number = patience(), self.version, self.config.num_observers
        with self._changed:
            self._changed.wait_for(lambda: self._error or self.is_complete(), seconds)
            if self._error:
                raise self._error
            row = self._come.pop(version, {})
            missing = [n for n in range(number) if n not in row]
            if missing:  # whoever plays for it or, if nobody does, who never asked
                late = min(missing, key=lambda n: self._last.get(n) != version)
                reason = f"did not hand over a rollout within {seconds:g} s"
                raise WorkerSilent(f"observer{late}", reason)
            return [row[n] for n in range(number)]

    def finish_episode(self, batch: Sequence[Rollout]) -> tuple[int, float]:  # type: ignore[override]  # as above
        """Make an update, and open another one."""
        lag_and_ratio = super().finish_episode(batch)
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
        return len(self._come[self.version]) == self.config.num_observers

    def _answer(self) -> None:
        """Answer the observers that wait for an update, where one is open to them."""
        with self._changed:
            ready = []
            for observer in list(self._asking):
                update = self._update_for(observer)
                if update is not None:
                    self._last[observer] = update
                if self._over or update is not None:
                    answer = None if self._over else (update, *self._newest)
                    ready.append((self._asking.pop(observer), answer))
        for future, answer in ready:
            future.set_result(answer)

    def _update_for(self, observer: int) -> int | None:
        """The next update that it has not had, if it is open."""
        version, _ = self._newest
        update = max(version, self._last.get(observer, -1) + 1)
        return update if update <= version + self.config.max_lag else None


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
    """The endless schedule of observers that wait for every update."""
    for update in count():
        yield dict.fromkeys(range(config.num_observers), update)


def run_locally(
    config: RolloutsConfig, schedule: Iterable[dict[int, int]] | None = None
) -> Training:
    """Train in this process by the schedule of a run or, without one, in step.

    It computes with one thread, as each worker does, so that the bits are the same.
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
        yield [observers[n].play(v, learner.kept[v]) for n, v in sorted(row.items())]
