"""See what a policy does: frames of CartPole, before and after training."""

import os
from collections.abc import Mapping

import gymnasium
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cdopt_tutorial.reinforce.learner import Actor, Policy
from cdopt_tutorial.reinforce.system import ENVIRONMENT

SEED = 0  # of the episode
EVERY = 2  # steps between two pictures; CartPole makes 50 steps a second


def frames(weights: Mapping[str, Tensor]) -> list[NDArray[np.uint8]]:
    """Pictures of a policy's episode, (200, 300, 3) uint8 each; called by chapter 1."""
    # gymnasium draws with pygame, which greets on stdout and looks for a screen.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    policy = Policy(hidden=len(weights["affine1.bias"]))
    policy.load_state_dict(weights)
    actor = Actor(policy, SEED)
    env = gymnasium.make(ENVIRONMENT, render_mode="rgb_array")
    state, _ = env.reset(seed=SEED)
    pictures, over, step = [], False, 0
    while not over:
        if step % EVERY == 0:
            pictures.append(_halve(env.render()))
        state, _, terminated, truncated, _ = env.step(actor.select(state[None])[0])
        over, step = terminated or truncated, step + 1
    env.close()
    return pictures


def side_by_side(left: list[NDArray], right: list[NDArray]) -> list[NDArray]:
    """One film of two; the one that is over first stands still on its last picture."""
    length = max(len(left), len(right))
    both = (film + [film[-1]] * (length - len(film)) for film in (left, right))
    return [np.concatenate(pair, axis=1) for pair in zip(*both, strict=True)]


def _halve(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width, _ = picture.shape
    blocks = picture.reshape(height // 2, 2, width // 2, 2, 3)
    return blocks.mean(axis=(1, 3)).astype(np.uint8)
