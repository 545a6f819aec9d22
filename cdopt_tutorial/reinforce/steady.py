"""An agent that goes on when an observer dies, with a new one in its place."""

from dataclasses import asdict, dataclass
from functools import partial

from torch.futures import Future

from cdopt_tutorial.engines.seam.reference import Reference
from cdopt_tutorial.engines.watch.errors import WorkerLost
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce.agent import Agent, Observer, ReinforceConfig
from cdopt_tutorial.reinforce.learner import Actor, Episodes


@dataclass(frozen=True)
class Lost:
    """What the agent reports of an observer that died and is replaced."""

    observer: str  #: its name, which the new one has as well
    round: int  #: the round, from 1, in which nothing of it counts


class SteadyAgent(Agent):
    """Learns from the observers that are left; the engine must replace who dies."""

    def __init__(self, config: ReinforceConfig, engine: Workers):
        super().__init__(config)
        self._engine, self._round = engine, 0
        self._lives: dict[int, int] = {}

    def run_episode(
        self, agent_rref: Reference, observer_rrefs: list[Reference]
    ) -> list[Episodes]:
        """The episodes of all that are left; again if there is none."""
        self._round += 1
        batch: list[Episodes] = []
        while not batch:
            self._waiting.expect(range(len(observer_rrefs)))
            futures = []
            for number, rref in enumerate(observer_rrefs):
                futures.append(rref.rpc_async(timeout=0).run_episode(agent_rref))
                # When the call fails, not when we wait: others may wait for it.
                futures[-1].add_done_callback(partial(self._leave_if_lost, number))
            for number, future in enumerate(futures):
                try:
                    batch.append(self._episodes(number, *future.wait()))
                except WorkerLost:
                    observer_rrefs[number] = self._replace(number)
        return batch

    def _replace(self, number: int) -> Reference:
        """A new observer; its random streams are nobody else's."""
        life = self._lives[number] = self._lives.get(number, 0) + 1
        config, name = Anew(**asdict(self.config), life=life), f"observer{number}"
        self._actors[number] = Actor(self.policy, config.seed_of(number, "actions"))
        self._engine.report("agent", Lost(name, self._round))
        return self._engine.remote(name, Observer, number, config)

    def _leave_if_lost(self, number: int, future: Future) -> None:
        try:
            future.value()
        except WorkerLost:
            self._waiting.leave(number)
        except Exception:
            return  # whoever waits for the future gets it


@dataclass(frozen=True)
class Anew(ReinforceConfig):
    """The settings of an observer that replaces one."""

    life: int = 1  #: how often there was one before it

    def seed_of(self, observer: int, purpose: str) -> int:
        """As if there were more observers: nobody has drawn from these streams."""
        return super().seed_of(observer + self.life * self.num_observers, purpose)
