"""The policy, and the rule by which it learns: REINFORCE, without any RPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

STATE_SIZE = 4  # CartPole: position, velocity, angle, angular velocity
NUM_ACTIONS = 2  # push to the left, push to the right


class Policy(nn.Module):
    """Scores CartPole's two actions by one hidden layer, without the dropout of old.

    Or as many actions as another environment has, for states of its size.
    """

    def __init__(
        self,
        state_size: int = STATE_SIZE,
        num_actions: int = NUM_ACTIONS,
        hidden: int = 128,
    ):
        super().__init__()
        self.affine1 = nn.Linear(state_size, hidden)
        self.affine2 = nn.Linear(hidden, num_actions)

    def forward(self, states: Tensor) -> Tensor:
        """Scores (logits) of the actions, (..., 2), for states (..., 4)."""
        return self.affine2(F.relu(self.affine1(states)))

    @torch.no_grad()
    def scores(self, states: NDArray) -> Tensor:
        """The same for acting, not learning: NumPy in, a tensor on the CPU out."""
        return self(torch.from_numpy(states).to(self.affine1.weight.device)).cpu()


class Actor:
    """Chooses an observer's actions, by a random stream of its own; notes its steps."""

    def __init__(self, policy: Policy, seed: int):
        self.policy = policy
        self.states, self.actions, self.rewards = [], [], []
        self._generator = torch.Generator().manual_seed(seed)

    def select(self, states: NDArray) -> NDArray:
        """Actions (n,) int64 for states (n, 4) float32."""
        return self.draw(states, self.policy.scores(states))

    def draw(self, states: NDArray, scores: Tensor) -> NDArray:
        """The same, drawn from the softmax of the states' scores (n, 2)."""
        # As torch.multinomial without its checks: a race of exponential clocks.
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
        """The same as episodes, of these lengths (n,), and truncated or not (n,)."""
        parts = *self.take_steps(), lengths, truncated
        return Episodes(*map(torch.from_numpy, parts))


@dataclass(frozen=True)
class Episodes:
    """One episode in each of n environments, padded to the longest one's T steps."""

    states: Tensor  #: (T, n, 4) float32, what the policy saw
    actions: Tensor  #: (T, n) int64, what it did
    rewards: Tensor  #: (T, n) float32, what it got; 0 after an episode's end
    lengths: Tensor  #: (n,) int64, steps of each episode
    truncated: Tensor  #: (n,) bool, cut by the time limit rather than ended by a fall

    @property
    def taken(self) -> Tensor:
        """(T, n) bool: which steps belong to an episode."""
        return torch.arange(len(self.rewards))[:, None] < self.lengths

    @property
    def totals(self) -> list[float]:
        """The n episodes' undiscounted sums of rewards."""
        return self.rewards.sum(dim=0).tolist()


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Returns G(t) = r(t) + γ G(t + 1) of rewards (T,) or (T, n), in one pass."""
    returns = rewards.clone()
    for following, step in pairwise(reversed(returns.unbind())):
        step.add_(following, alpha=gamma)
    return returns


def episode_returns(episodes: Episodes, gamma: float) -> Tensor:
    """Returns (T, n) of padded episodes, with truncation told from termination.

    After the time limit an episode would have gone on: its tail is taken to be worth
    what the start of one is worth on average in these.
    """
    returns = discounted_returns(episodes.rewards, gamma)
    tail = torch.where(episodes.truncated, returns[0].mean(), 0.0)
    steps_left = episodes.lengths - torch.arange(len(returns))[:, None]
    return returns + episodes.taken * gamma ** steps_left.clamp(min=0) * tail


def log_probs(policy: Policy, episodes: Episodes) -> Tensor:
    """(steps,) on the CPU: of each action taken, its log-probability here."""
    device, taken = policy.affine1.weight.device, episodes.taken
    states, actions = episodes.states[taken], episodes.actions[taken]
    return _chosen(policy, states.to(device), actions.to(device)).cpu()


def policy_loss(
    policy: Policy,
    batch: Sequence[Episodes],
    gamma: float,
    weighting: Tensor | None = None,
) -> Tensor:
    """REINFORCE's loss of a batch of episodes (Williams 1992), a scalar.

    The mean over all steps of -log p(action) times the return, normalised (Li 2020),
    and times the step's weight, if a weighting (steps,) is given.
    """
    parts = [
        (e.states[e.taken], e.actions[e.taken], episode_returns(e, gamma)[e.taken])
        for e in batch
    ]
    device, columns = policy.affine1.weight.device, zip(*parts, strict=True)
    states, actions, returns = (torch.cat(each).to(device) for each in columns)
    eps = torch.finfo(returns.dtype).eps
    advantages = (returns - returns.mean()) / (returns.std(correction=0) + eps)
    if weighting is not None:
        advantages = advantages * weighting.to(device)
    return -(_chosen(policy, states, actions) * advantages).mean()


def _chosen(policy: Policy, states: Tensor, actions: Tensor) -> Tensor:
    scores = F.log_softmax(policy(states), dim=1)
    return scores.gather(1, actions[:, None]).squeeze(1)
