"""The policy and its learning rule: REINFORCE, without any RPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F


class Policy(nn.Module):
    """Scores actions, CartPole's by default: one hidden layer, and no dropout."""

    def __init__(self, state_size: int = 4, num_actions: int = 2, hidden: int = 128):
        super().__init__()
        self.affine1 = nn.Linear(state_size, hidden)
        self.affine2 = nn.Linear(hidden, num_actions)

    def forward(self, states: Tensor) -> Tensor:
        """Scores (logits) of the actions, (..., 2), in states (..., 4)."""
        return self.affine2(F.relu(self.affine1(states)))

    @torch.no_grad()
    def scores(self, states: NDArray) -> Tensor:
        """The same without gradients: from an array to a tensor on the CPU."""
        return self(torch.from_numpy(states).to(self.affine1.weight.device)).cpu()


class Actor:
    """Draws an observer's actions from its own random stream, and records its steps."""

    def __init__(self, policy: Policy, seed: int):
        self.policy = policy
        self.states: list[NDArray] = []
        self.actions: list[NDArray] = []
        self.rewards: list[NDArray] = []
        self._generator = torch.Generator().manual_seed(seed)

    def select(self, states: NDArray) -> NDArray:
        """Actions (n,) int64 for states (n, 4) float32."""
        return self.draw(states, self.policy.scores(states))

    def draw(self, states: NDArray, scores: Tensor) -> NDArray:
        """The same from the states' scores (n, 2), whose softmax is sampled."""
        # As torch.multinomial does without its checks: a race of exponential clocks.
        clocks = torch.empty_like(scores).exponential_(generator=self._generator)
        actions = (torch.softmax(scores, dim=1) / clocks).argmax(dim=1).numpy()
        self.states.append(states)
        self.actions.append(actions)
        return actions

    def take_steps(self) -> list[NDArray]:
        """States (T, n, 4), actions and rewards (T, n) since this was last called."""
        steps = self.states, self.actions, self.rewards
        self.states, self.actions, self.rewards = [], [], []
        return [np.array(part) for part in steps]

    def episodes(self, lengths: NDArray, truncated: NDArray) -> "Episodes":
        """The same as episodes of these lengths (n,), some of them truncated (n,)."""
        parts = *self.take_steps(), lengths, truncated
        return Episodes(*map(torch.from_numpy, parts))


@dataclass(frozen=True)
class Episodes:
    """One episode in each of n environments, padded to the longest one's T steps."""

    states: Tensor  #: (T, n, 4) float32, what the policy saw
    actions: Tensor  #: (T, n) int64, what it did
    rewards: Tensor  #: (T, n) float32, what it earned; 0 after an episode's end
    lengths: Tensor  #: (n,) int64, steps of each episode
    truncated: Tensor  #: (n,) bool, ended by the time limit rather than by a fall

    @property
    def taken(self) -> Tensor:
        """(T, n) bool: which steps belong to an episode."""
        return torch.arange(len(self.rewards))[:, None] < self.lengths

    @property
    def totals(self) -> list[float]:
        """The undiscounted reward of each of the n episodes."""
        return self.rewards.sum(dim=0).tolist()


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Returns G(t) = r(t) + γ G(t + 1) of rewards (T,) or (T, n), in one pass."""
    returns = rewards.clone()
    for following, step in pairwise(reversed(returns.unbind())):
        step.add_(following, alpha=gamma)
    return returns


def episode_returns(episodes: Episodes, gamma: float) -> Tensor:
    """Returns (T, n) of padded episodes; truncated ones are credited with a tail.

    Without the time limit such an episode would have gone on: its tail counts as much
    as an episode's mean return from the start.
    """
    returns = discounted_returns(episodes.rewards, gamma)
    tail = torch.where(episodes.truncated, returns[0].mean(), 0.0)
    steps_left = episodes.lengths - torch.arange(len(returns))[:, None]
    return returns + episodes.taken * gamma ** steps_left.clamp(min=0) * tail


def log_probs(policy: Policy, episodes: Episodes) -> Tensor:
    """Log-probability of each action taken, (steps,) on the CPU."""
    device, taken = policy.affine1.weight.device, episodes.taken
    states, actions = episodes.states[taken], episodes.actions[taken]
    return _chosen(policy, states.to(device), actions.to(device)).cpu()


def policy_loss(
    policy: Policy,
    batch: Sequence[Episodes],
    gamma: float,
    weighting: Tensor | None = None,
) -> Tensor:
    """REINFORCE's loss of a batch of episodes, a scalar (Williams 1992).

    The mean over all steps of -log p(action) times the normalised return (Li 2020),
    and times the step's weight where a weighting (steps,) is given.
    """
    parts = [
        (e.states[e.taken], e.actions[e.taken], episode_returns(e, gamma)[e.taken])
        for e in batch
    ]
    device, columns = policy.affine1.weight.device, zip(*parts, strict=True)
    states, actions, returns = (torch.cat(column).to(device) for column in columns)
    eps = torch.finfo(returns.dtype).eps
    advantages = (returns - returns.mean()) / (returns.std(correction=0) + eps)
    if weighting is not None:
        advantages = advantages * weighting.to(device)
    return -(_chosen(policy, states, actions) * advantages).mean()


def _chosen(policy: Policy, states: Tensor, actions: Tensor) -> Tensor:
    scores = F.log_softmax(policy(states), dim=1)
    return scores.gather(1, actions[:, None]).squeeze(1)
