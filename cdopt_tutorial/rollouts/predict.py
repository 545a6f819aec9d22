"""Predict a run's speed and lag by playing its rules in simulated time.

Observers and the agent share the cores, first come, first served; waiting needs none.
Waits follow from the run's seed; episodes are as long as the measured ones.
"""

import heapq
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import fmean
from types import SimpleNamespace

from numpy.random import default_rng

from cdopt_tutorial import checks
from cdopt_tutorial.engines.one_process import OneProcess
from cdopt_tutorial.rollouts.simulator import wait_ms
from cdopt_tutorial.rollouts.system import AheadAgent, RolloutsConfig, in_step

Turn = tuple[float, float] | None  # seconds on a core and of waiting; None: until woken


@dataclass(frozen=True)
class Costs:
    """Seconds that each part of a run takes on a machine, and lengths of episodes."""

    call: float  #: both calls of an observer for a rollout
    play: float  #: a rollout except its steps: weights, probabilities
    forward: float  #: the policy, per step
    step: float  #: an observer's environments, per step
    trip: float  #: to a simulator and back, per step
    update: float  #: an update except its rollouts
    rollout: float  #: each rollout of an update
    cores: int
    num_envs: int  #: of each observer
    #: of rollouts by untrained policies: steps in a row, and summed over environments.
    lengths: list[tuple[int, int]]

    def parts(self, config: RolloutsConfig) -> dict[str, float]:
        """Seconds of a step's and a rollout's work, of its waits, and of an update."""
        step = self.forward + self.step + (self.trip if config.step_ms else 0)
        steps = fmean(steps for steps, _ in self.lengths)
        rollout = self.call + self.play + steps * step
        update = self.update + config.num_rollouts * self.rollout
        waits = steps * config.step_ms / 1000
        return {"step": step, "rollout": rollout, "waits": waits, "update": update}

    def bounds(self, config: RolloutsConfig) -> dict[str, float]:
        """Environment steps per second if only one of these were the limit."""
        parts, k = self.parts(config), config.num_rollouts
        steps = fmean(steps for _, steps in self.lengths)
        turn = parts["rollout"] + parts["waits"]
        return {
            "observers": config.num_observers * steps / turn,
            "cores": self.cores * k * steps / (k * parts["rollout"] + parts["update"]),
            "agent": k * steps / parts["update"],
        }

    def knee(self, config: RolloutsConfig) -> tuple[int, str]:
        """The fewest observers that are not the limit themselves, and what is then."""
        for k in count(1):
            bounds = self.bounds(replace(config, num_observers=k, num_rollouts=k))
            if (limit := min(bounds, key=bounds.get)) != "observers":
                return k, limit


def predict(
    costs: Costs, config: RolloutsConfig, alone: bool = False
) -> tuple[float, float]:
    """Environment steps per second and mean lag of a run on workers.

    With `alone`, of one process that plays all parts. A ValueError if the costs are
    those of observers with more or fewer environments.
    """
    fits = config.num_envs == costs.num_envs
    checks.check(config, "num_envs", fits, f"{costs.num_envs}, as calibrated")
    run = _Run(costs, config)
    observers = map(run.observe, range(config.num_observers))
    return run.take([run.alone()] if alone else [run.learn(), *observers])


class _Run(AheadAgent):
    """The agent of a run that keeps the rules, but plays and learns nothing."""

    def __init__(self, costs: Costs, config: RolloutsConfig):
        super().__init__(config, OneProcess())
        self._costs, self._parts = costs, costs.parts(config)
        episodes = config.num_rollouts * config.num_envs  # of an update
        self._updates = -(-config.max_episodes // episodes)
        self._steps, self._lags, self._acted = 0, [], False
        seeds = [config.seed_of(n, "environments") for n in range(config.num_observers)]
        # Each observer's simulator clock, and its choice of episodes.
        self._clocks = [default_rng(seed).spawn(1)[0] for seed in seeds]
        self._dice = [default_rng([seed, 1]) for seed in seeds]

    def take(self, processes: list[Iterator[Turn]]) -> tuple[float, float]:
        """Run the processes until the first of them, which learns, has ended."""
        cores = [0.0] * self._costs.cores  # when each is free
        turns, idle = [(0.0, n) for n in range(len(processes))], []
        while True:
            now, number = heapq.heappop(turns)
            try:
                turn = next(processes[number])
            except StopIteration:
                return self._steps / now, fmean(self._lags)
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
        """One process, which plays in step and makes no calls."""
        for row in islice(in_step(self.config), self._updates):
            for number in row:
                self._steps += yield from self._play(number, self._costs.play)
            yield self._parts["update"], 0.0
            self._lags.append(0)

    def learn(self) -> Iterator[Turn]:
        """The agent."""
        while self.version < self._updates:
            while not self.is_complete():
                yield None
            batch = self.next_batch()
            yield self._parts["update"], 0.0
            self._lags += [self.version - rollout.version for rollout in batch]
            self._steps += sum(rollout.steps for rollout in batch)
            self.version += 1
            self.kept = {self.version: {}}
            self.open_next()
            self._acted = True

    def observe(self, number: int) -> Iterator[Turn]:
        """An observer, whose calls take effect halfway."""
        quarter = self._costs.call / 4
        while True:
            given = self.begin(number)
            while not given.done():
                yield None
            update, version, _ = given.wait()
            steps = yield from self._play(number, quarter + self._costs.play)
            yield quarter, 0.0
            done = SimpleNamespace(observer=number, version=version, steps=steps)
            self.hand_over(update, done)
            self._acted = True
            yield 2 * quarter, 0.0

    def _play(self, number: int, before: float) -> Generator[Turn, None, int]:
        """One rollout; returns its steps in all environments."""
        yield before, 0.0
        lengths, config = self._costs.lengths, self.config
        steps, env_steps = lengths[self._dice[number].integers(len(lengths))]
        for _ in range(steps):
            wait = wait_ms(config.step_ms, config.waits, self._clocks[number])
            yield self._parts["step"], wait / 1000
        return env_steps
