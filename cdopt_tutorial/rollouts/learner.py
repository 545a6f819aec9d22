"""Chapter 8's learner and observers: rollouts by weights of some version.

An observer says with which weights it has played, and how probable its actions were;
the learner corrects for their age, and refuses a rollout if either claim is false.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cdopt_tutorial.checks import at_least, check, choices
from cdopt_tutorial.engines.seam.device import device_for
from cdopt_tutorial.engines.seam.reference import LocalRef, Reference
from cdopt_tutorial.reinforce.agent import ENVIRONMENT, Agent, ReinforceConfig
from cdopt_tutorial.reinforce.agent import Observer as Player
from cdopt_tutorial.reinforce.learner import Episodes, Policy, log_probs, policy_loss
from cdopt_tutorial.rollouts.simulator import WAITS, Simulator

Weights = dict[str, Tensor]
# Of log-probabilities that two workers compute from the same weights. On one machine
# they are the same; over the code paths of a CPU they differed by at most 7e-7, but by
# at least 0.2 with weights of the next version, over twenty updates.
ROUNDING = 1e-4


@dataclass(frozen=True)
class RolloutsConfig:
    """Settings of a run; a ValueError if one is out of its range, or no such device."""

    num_observers: int = 2  #: observers, each on a worker of its own, at least 1
    num_envs: int = 16  #: environments of each observer, one episode of each a rollout
    #: rollouts of an update, each of another observer; None takes one of each.
    num_rollouts: int | None = None
    #: updates for which observers play ahead; with 0 they wait for every update.
    max_lag: int = 1
    #: the largest ratio that counts, of an action's probability in the policy that
    #: learns to that in the policy that played; 0 leaves the ratio out.
    clip: float = 2.0
    #: milliseconds that each step waits for its simulator; 0 has no simulator.
    step_ms: float = 0.0
    waits: str = "fixed"  #: those milliseconds: "fixed", or "heavy", with the same mean
    gamma: float = 0.99  #: discount factor of the rewards, above 0 and at most 1
    lr: float = 1e-2  #: learning rate of Adam, above 0
    seed: int = 1  #: of the policy's start, the environments and the choice of actions
    max_episodes: int = 10_000  #: episodes after which an unsolved run ends
    log_interval: int = 10  #: updates between two log lines
    #: of the agent's and the observers' policies, as :func:`~.device.pick_device`
    #: takes it; what travels, and all chance, is on the CPU.
    device: str = "cpu"

    def __post_init__(self):
        at_least(self, 0, "max_lag", "clip", "step_ms")
        choices(self, waits=WAITS)
        object.__setattr__(self, "device", self.as_reinforce().device)
        if self.num_rollouts is None:
            object.__setattr__(self, "num_rollouts", self.num_observers)
        fits = 1 <= self.num_rollouts <= self.num_observers
        check(self, "num_rollouts", fits, "at least 1 and at most num_observers")

    def as_reinforce(self) -> ReinforceConfig:
        """The settings of chapter 1's system, which plays and learns alike, in step."""
        names = {each.name for each in fields(ReinforceConfig)} - {"conversation"}
        same = {name: getattr(self, name) for name in sorted(names)}
        return _Settings("local-policy", **same, step_ms=self.step_ms, waits=self.waits)


@dataclass(frozen=True)
class _Settings(ReinforceConfig):
    """Those of an observer whose environments may be in a simulator."""

    step_ms: float = 0.0
    waits: str = "fixed"

    def make_environments(self) -> Any:
        if not self.step_ms:
            return super().make_environments()
        return Simulator(ENVIRONMENT, self.num_envs, self.step_ms, self.waits)


@dataclass(frozen=True)
class Rollout:
    """What an observer hands over: its episodes, and the policy by which it played."""

    number: int  #: of rollouts that this observer has played before
    version: int  #: of the weights
    episodes: Episodes  #: one in each of its environments
    #: (steps,), of the actions taken, in the policy that took them; in the order of
    #: ``episodes.taken``.
    log_probs: Tensor


class Observer:
    """Plays one rollout after another in environments of its own."""

    def __init__(self, number: int, config: RolloutsConfig):
        self._number, self._played = number, 0
        self._player = Player(number, config.as_reinforce())

    def play(self, version: int, weights: Weights) -> Rollout:
        """One episode in each environment, all of them with these weights."""
        given = _Given(weights)
        ends = self._player.run_episode(LocalRef(given))
        episodes = Episodes(*map(torch.from_numpy, (*given.steps, *ends)))
        before, self._played = self._played, self._played + 1
        with torch.no_grad():  # of the policy itself, whatever has become of it
            chances = log_probs(self._player.policy, episodes)
        return Rollout(before, version, episodes, chances)

    def play_ahead(self, agent_rref: Reference) -> None:
        """Play until no update is to come; the agent calls it once."""
        agent = agent_rref.rpc_sync(timeout=0)  # it answers when an update is open
        while given := agent.begin(self._number):
            update, version, weights = given
            agent.hand_over(update, self._number, self.play(version, weights))
        self._player.close()


@dataclass
class _Given:
    """In the place of chapter 1's agent: gives weights, and takes a round's steps."""

    given: Weights

    def weights(self) -> Weights:
        return self.given

    def report_steps(self, observer: int, *steps: Any) -> None:
        self.steps = steps


class Learner:
    """The policy that learns, and its weights at the last few versions."""

    def __init__(self, config: RolloutsConfig):
        agent = Agent(config.as_reinforce())  # the same start as in chapter 1
        self._policy, self._optimizer = agent.policy, agent.optimizer
        self._old = Policy().to(device_for(config.device, 0))
        self.config, self.version = config, 0  #: updates so far
        #: by version, as far back as an observer may lag; copies, which nobody changes.
        self.kept: dict[int, Weights] = {}
        self._played: dict[int, int] = {}
        self._keep()

    def update(self, batch: dict[int, Rollout]) -> tuple[int, float]:
        """One step of Adam on rollouts, by observer; return the largest lag and ratio.

        A ratio is an action's probability in the policy that learns over that in the
        policy that played. A RuntimeError names a rollout that is not what it says.
        """
        for observer, rollout in batch.items():
            self._check(observer, rollout)
        self._played |= {n: rollout.number + 1 for n, rollout in batch.items()}
        rollouts, clip = list(batch.values()), self.config.clip
        ratios = torch.cat([self._ratios(rollout) for rollout in rollouts])
        episodes = [rollout.episodes for rollout in rollouts]
        weighting = ratios.clamp(max=clip) if clip else None
        self._optimizer.zero_grad()
        loss = policy_loss(self._policy, episodes, self.config.gamma, weighting)
        loss.backward()
        self._optimizer.step()
        lag = self.version - min(rollout.version for rollout in rollouts)
        self.version += 1
        self._keep()
        return lag, ratios.max().item()

    def _keep(self) -> None:
        weights = self._policy.state_dict().items()
        copies = {name: value.to("cpu", copy=True) for name, value in weights}
        self.kept[self.version] = copies
        self.kept.pop(self.version - self.config.max_lag - 1, None)

    @torch.no_grad()
    def _check(self, observer: int, rollout: Rollout) -> None:
        """Refuse one that is too old, was not played by its weights, or is not next."""
        what = f"a rollout of observer{observer} for update {self.version}"
        weights = self.kept.get(rollout.version)
        if weights is None:
            known = f"only {min(self.kept)} to {max(self.kept)} are known"
            raise RuntimeError(f"{what} is of version {rollout.version}, but {known}")
        self._old.load_state_dict(weights)
        now = log_probs(self._old, rollout.episodes)
        gap = (now - rollout.log_probs).abs().max().item()
        if not gap <= ROUNDING:
            played = f"was not played by the weights of version {rollout.version}"
            raise RuntimeError(
                f"{what} {played}: log-probabilities differ by {gap:.1g}"
            )
        expected = self._played.get(observer, 0)
        if rollout.number != expected:
            lost = f"is its number {rollout.number}, but {expected} was expected"
            raise RuntimeError(f"{what} {lost}: one was lost, or came twice")

    @torch.no_grad()
    def _ratios(self, rollout: Rollout) -> Tensor:
        # For each rollout alone, as its observer has computed them: the same shapes
        # give the same bits, so that the same weights give exactly 1.
        return (log_probs(self._policy, rollout.episodes) - rollout.log_probs).exp()
