"""An agent that survives the death of an observer, with a new one in its place."""

from dataclasses import dataclass
from functools import partial

from torch.futures import Future

from cdopt_tutorial.engines.seam.reference import Reference
from cdopt_tutorial.engines.watch.errors import WorkerLost
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.agent import Agent, Observer, ReinforceConfig
from cdopt_tutorial.reinforce.learner import Actor, Episodes


@dataclass(frozen=True)
class Lost:
    """What the agent reports when an observer died and is replaced."""

    observer: str  #: its name, which its replacement takes over
    round: int  #: the round, from 1, in which nothing of it counts


class SteadyAgent(Agent):
    """Learns from the survivors; the engine must replace workers that die."""

    def __init__(self, config: ReinforceConfig, engine: Workers):
        super().__init__(config)
        self._engine, self._round = engine, 0
        self._numbers = list(range(config.num_observers))

    def run_episode(
        self, agent_rref: Reference, observer_rrefs: list[Reference]
    ) -> list[Episodes]:
        """The episodes of all that survive; the round is repeated if none does."""
        self._round += 1
        batch: list[Episodes] = []
        while not batch:
            futures = self._command(agent_rref, observer_rrefs)
            for place, future in enumerate(futures):
                # As soon as the call fails, since other observers may wait for it.
                future.add_done_callback(partial(self._leave_if_failed, place))
            for place, future in enumerate(futures):
                try:
                    batch.append(self._actors[place].episodes(*future.wait()))
                except WorkerLost:
                    observer_rrefs[place] = self._replace(place)
        return batch

    def _replace(self, place: int) -> Reference:
        config, worker = self.config, self.config.worker_of(place)
        self._numbers[place] += config.num_observers
        number = self._numbers[place]
        self._actors[place] = Actor(self.policy, config.seed_of(number, "actions"))
        self._engine.report(Lost(worker, self._round))
        return self._engine.remote(worker, Observer, number, config)

    def _leave_if_failed(self, place: int, future: Future) -> None:
        try:
            future.value()
        except Exception:
            self._waiting.leave(place)
