"""Attaches to an agent, which then goes on when an observer dies, with a new one."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from torch.futures import Future

from cdopt_tutorial.engines.probes.attach import wrap
from cdopt_tutorial.engines.seam.reference import Reference
from cdopt_tutorial.engines.watch.errors import WorkerLost
from cdopt_tutorial.engines.workers import Workers
from cdopt_tutorial.reinforce import system
from cdopt_tutorial.reinforce.learner import Actor, Episodes


@dataclass(frozen=True)
class Lost:
    """What the agent reports of an observer that died and is replaced."""

    observer: str  #: its name, which the new one has as well
    round: int  #: the round, from 1, in which nothing of it counts


def attach(engine: Workers) -> None:
    """Called in every worker first: an agent learns from the observers that are left.

    The engine must replace workers that die.
    """
    wrap(system.Agent.run_episode, _Steadily(engine).run_episode)


class _Steadily:
    """What one agent does in place of a round in which nobody may die."""

    def __init__(self, engine: Workers):
        self._engine, self._round = engine, 0
        self._lives: dict[int, int] = {}

    def run_episode(
        self,
        function: Callable,
        agent: system.Agent,
        agent_rref: Reference,
        observer_rrefs: list[Reference],
    ) -> list[Episodes]:
        """The episodes of all that are left; again if there is none."""
        self._round += 1
        batch: list[Episodes] = []
        while not batch:
            agent._waiting.expect(range(len(observer_rrefs)))
            futures = []
            for number, rref in enumerate(observer_rrefs):
                futures.append(rref.rpc_async().run_episode(agent_rref))
                # When the call fails, not when we wait: others may wait for it.
                leave = partial(_leave_if_lost, agent, number)
                futures[-1].add_done_callback(leave)
            batch = self._take(agent, futures, observer_rrefs)
        return batch

    def _take(
        self,
        agent: system.Agent,
        futures: Sequence[Future],
        observer_rrefs: list[Reference],
    ) -> list[Episodes]:
        batch = []
        for number, future in enumerate(futures):
            try:
                batch.append(agent._episodes(number, *future.wait()))
            except WorkerLost:
                observer_rrefs[number] = self._replace(agent, number)
        return batch

    def _replace(self, agent: system.Agent, number: int) -> Reference:
        """A new observer; its random streams are nobody else's."""
        life = self._lives[number] = self._lives.get(number, 0) + 1
        config, name = Anew(**asdict(agent.config), life=life), f"observer{number}"
        seed = config.seed_of(number, "actions")
        agent._actors[number] = Actor(agent.policy, seed)
        self._engine.report("agent", Lost(name, self._round))
        return self._engine.remote(name, system.Observer, number, config)


def _leave_if_lost(agent: system.Agent, number: int, future: Future) -> None:
    try:
        future.value()
    except WorkerLost:
        agent._waiting.leave(number)
    except Exception:
        return  # whoever waits for the future gets it


@dataclass(frozen=True)
class Anew(system.ReinforceConfig):
    """The settings of an observer that replaces one."""

    life: int = 1  #: how often there was one before it

    def seed_of(self, observer: int, purpose: str) -> int:
        """As if there were more observers: nobody has drawn from these streams."""
        return super().seed_of(observer + self.life * self.num_observers, purpose)
