"""What a run costs, of a few constants: the agent's own rules, in simulated time.

Observers and the agent take turns at the cores, first come, first served; a wait needs
none. Waits are those of the run's seed, and episodes as long as were measured.
"""

import heapq
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from types import SimpleNamespace

from numpy.random import Generator as Stream
from numpy.random import default_rng

from cdopt_tutorial.engines.one_process import OneProcess
from cdopt_tutorial.rollouts.simulator import wait_ms
from cdopt_tutorial.rollouts.system import AheadAgent, RolloutsConfig, in_step


@dataclass(frozen=True)
class Costs:
    """Seconds that each part of a run takes on a machine; and lengths of episodes."""

    call: float  #: both calls of an observer for a rollout
    play: float  #: of a rollout besides its steps: weights, probabilities
    forward: float  #: the policy, in a step
    step: float  #: an observer's environments, in a step
    trip: float  #: to a simulator and back, in a step
    update: float  #: an update besides its rollouts
    rollout: float  #: each rollout in an update
    cores: int
    num_envs: int  #: of each observer
    #: of rollouts by policies that have not learned: their steps in a row, and in all
    #: environments.
    lengths: list[tuple[int, int]]

    def parts(self, config: RolloutsConfig) -> dict[str, float]:
        """Seconds of a step's computing, a rollout, and an update of a config."""
        step = self.forward + self.step + (self.trip if config.step_ms else 0)
        steps = sum(steps for steps, _ in self.lengths) / len(self.lengths)
        waits = steps * config.step_ms / 1000
        rollout = self.call + self.play + steps * step
        update = self.update + config.num_rollouts * self.rollout
        return {"step": step, "rollout": rollout, "waits": waits, "update": update}

    def bounds(self, config: RolloutsConfig) -> dict[str, float]:
        """Environment steps per second if nothing but one of these was in the way."""
        parts, batch = self.parts(config), config.num_rollouts
        computed = batch * parts["rollout"] + parts["update"]
        steps = sum(steps for _, steps in self.lengths) / len(self.lengths)
        lasts = parts["rollout"] + parts["waits"]
        return {
            "observers": config.num_observers * steps / lasts,
            "cores": self.cores * batch * steps / computed,
            "agent": batch * steps / parts["update"],
        }

    def knee(self, config: RolloutsConfig) -> tuple[int, str]:
        """How many observers are the first that are not the bound; and what is it."""
        for number in count(1):
            more = replace(config, num_observers=number, num_rollouts=number)
            bounds = self.bounds(more)
            if (limit := min(bounds, key=bounds.get)) != "observers":
                return number, limit


@dataclass(frozen=True)
class Prediction:
    """What a run would come to."""

    steps_per_second: float  #: in all environments
    mean_lag: float  #: of the rollouts


def predict(costs: Costs, config: RolloutsConfig, alone: bool = False) -> Prediction:
    """What a run on workers would come to; or of one process, which plays all parts.

    A ValueError if the costs are of observers with another number of environments.
    """
    if config.num_envs != costs.num_envs:
        measured = f"but the costs are of observers with {costs.num_envs}"
        raise ValueError(f"num_envs is {config.num_envs}, {measured}")
    run = _Run(costs, config)
    return run.of([run.alone()] if alone else run.workers())


Turn = tuple[float, float] | None  # seconds on a core and of a wait; or for others


class _Run(AheadAgent):
    """The agent of a run in which nothing is played or learned; its rules are kept."""

    def __init__(self, costs: Costs, config: RolloutsConfig):
        super().__init__(config, OneProcess())
        self._costs, self._parts = costs, costs.parts(config)
        episodes = config.num_rollouts * config.num_envs
        self._last_update = -(-config.max_episodes // episodes)
        self._env_steps, self._found_lags, self._acted = 0, [], False
        self._streams = [self._stream(n) for n in range(config.num_observers)]

    def of(self, processes: list[Iterator[Turn]]) -> Prediction:
        """Let processes run until the first of them, which learns, has ended."""
        cores = [0.0] * self._costs.cores  # when each is free
        turns, idle = [(0.0, n) for n in range(len(processes))], []
        while True:
            now, number = heapq.heappop(turns)
            try:
                turn = next(processes[number])
            except StopIteration:
                lags = self._found_lags
                return Prediction(self._env_steps / now, sum(lags) / len(lags))
            if turn is None:
                idle.append(number)
            else:
                begin = max(now, cores[0])
                heapq.heapreplace(cores, begin + turn[0])
                heapq.heappush(turns, (begin + sum(turn), number))
            if self._acted:
                turns += [(now, number) for number in idle]
                heapq.heapify(turns)
                idle, self._acted = [], False

    def alone(self) -> Iterator[Turn]:
        """One process, which plays in step, and makes no calls."""
        for row in islice(in_step(self.config), self._last_update):
            for number in row:
                self._env_steps += yield from self._play(number, self._costs.play)
            yield self._parts["update"], 0.0
            self._found_lags.append(0)

    def workers(self) -> list[Iterator[Turn]]:
        """The agent, and its observers."""
        observers = map(self._observer, range(self.config.num_observers))
        return [self._learner(), *observers]

    def _learner(self) -> Iterator[Turn]:
        while self.version < self._last_update:
            while not self.is_complete():
                yield None
            batch = self.next_batch()
            yield self._parts["update"], 0.0
            self._found_lags += [self.version - rollout.version for rollout in batch]
            self._env_steps += sum(rollout.env_steps for rollout in batch)
            self.version += 1
            self.kept = {self.version: {}}
            self.open_next()
            self._acted = True

    def _observer(self, number: int) -> Iterator[Turn]:
        while True:
            given = self.begin(number)
            while not given.done():
                yield None
            update, version, _ = given.wait()
            # Of both calls the agent sees an end and a beginning, half of them apart.
            before = self._costs.call / 4 + self._costs.play
            env_steps = yield from self._play(number, before)
            yield self._costs.call / 4, 0.0
            rollout = {"observer": number, "version": version, "env_steps": env_steps}
            self.hand_over(update, SimpleNamespace(**rollout))
            self._acted = True
            yield self._costs.call / 2, 0.0

    def _play(self, number: int, before: float) -> Generator[Turn, None, int]:
        """One rollout; returns its steps in all environments."""
        clock, dice = self._streams[number]
        yield before, 0.0
        lengths = self._costs.lengths
        steps, env_steps = lengths[dice.integers(len(lengths))]
        for _ in range(steps):
            wait = wait_ms(self.config.step_ms, self.config.waits, clock)
            yield self._parts["step"], wait / 1000
        return env_steps

    def _stream(self, number: int) -> tuple[Stream, Stream]:
        """Of its waits, which are those of its simulator, and of its lengths."""
        seed = self.config.seed_of(number, "environments")
        (clock,) = default_rng(seed).spawn(1)
        return clock, default_rng([seed, 1])
