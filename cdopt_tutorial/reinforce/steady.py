"""An agent that goes on when an observer dies: with a new one, without its round."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch.futures import Future

from cdopt_tutorial.engines.errors import WorkerLost
from cdopt_tutorial.engines.reference import Reference
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.learner import Actor, Episodes
from cdopt_tutorial.reinforce.system import Agent, Observer, ReinforceConfig


@dataclass(frozen=True)
class Lost:
    """What the agent reports of an observer that died and was replaced."""

    observer: str  #: its name, which the new one has as well
    round: int  #: the round in which nothing of it counts, from 1


class SteadyAgent(Agent):
    """Learns from the episodes of the observers that are left in a round."""

    def __init__(self, engine: Workers, config: ReinforceConfig):
        super().__init__(config)
        self._engine, self._round = engine, 0
        self._lives = [0] * config.num_observers

    def run_episode(
        self, agent_rref: Reference, observer_rrefs: list[Reference]
    ) -> list[Episodes]:
        """As an agent does, again if no observer is left; the dead are replaced."""
        self._round += 1
        batch: list[Episodes] = []
        while not batch:
            self._waiting.expect(range(len(observer_rrefs)))
            futures = []
            for number, rref in enumerate(observer_rrefs):
                futures.append(rref.rpc_async().run_episode(agent_rref))
                futures[-1].add_done_callback(partial(self._leave_if_lost, number))
            batch = self._take(futures, observer_rrefs)
        return batch

    def _leave_if_lost(self, number: int, future: Future) -> None:
        # At once: the others may wait for it, and we for them.
        try:
            future.value()
        except WorkerLost:
            self._waiting.leave(number)

    def _take(
        self, futures: Sequence[Future], observer_rrefs: list[Reference]
    ) -> list[Episodes]:
        """The episodes of those who are left; new observers for the others."""
        batch = []
        for number, future in enumerate(futures):
            try:
                batch.append(self._episodes(number, *future.wait()))
            except WorkerLost:
                observer_rrefs[number] = self._replace(number)
        return batch

    def _replace(self, number: int) -> Reference:
        """A new observer, with random streams that were not drawn from before."""
        self._lives[number] += 1
        life, name = self._lives[number], f"observer{number}"
        seed = self.config.seed_of(number, "actions", life)
        self._actors[number] = Actor(self.policy, seed)
        self._engine.report("agent", Lost(name, self._round))
        return self._engine.remote(name, Observer, number, self.config, life)
