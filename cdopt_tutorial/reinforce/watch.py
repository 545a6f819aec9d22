"""See what a policy does: frames of CartPole, before and after training."""

import os
from collections.abc import Mapping

import gymnasium
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cdopt_tutorial.reinforce.agent import ENVIRONMENT
from cdopt_tutorial.reinforce.learner import Actor, Policy

SEED = 0  # of the episode
EVERY = 2  # steps between two pictures; CartPole makes 50 steps a second
PAUSE = 25  # pictures for which a film rests on its last one before it begins again
DIVIDER = 4  # columns between two films, of a grey that is seen beside white and black
FLOOR = 50  # white rows below the film, over which a browser lays its controls


def frames(weights: Mapping[str, Tensor]) -> list[NDArray[np.uint8]]:
    """Pictures of a policy's episode, (200, 300, 3) uint8 each; called by chapter 1.

    An episode that counts ends when the pole leans by 12°; here it falls to the side.
    """
    # gymnasium draws with pygame, which greets on stdout and looks for a screen.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    policy = Policy()
    policy.load_state_dict(weights)
    actor = Actor(policy, SEED)
    env = gymnasium.make(ENVIRONMENT, render_mode="rgb_array")
    env.unwrapped.theta_threshold_radians = np.pi / 2
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
    """One film of two, as long as the longer one; the other begins again and again."""
    between = np.full((len(left[0]), DIVIDER, 3), 128, dtype=np.uint8)
    pictures = [
        np.concatenate([_picture(left, i), between, _picture(right, i)], axis=1)
        for i in range(max(len(left), len(right)))
    ]
    floor = (0, FLOOR), (0, 0), (0, 0)
    return [np.pad(picture, floor, constant_values=255) for picture in pictures]


def _picture(film: list[NDArray], time: int) -> NDArray:
    """The picture of a film that rests at its end, and begins again."""
    return film[min(time % (len(film) + PAUSE), len(film) - 1)]


def _halve(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width, _ = picture.shape
    blocks = picture.reshape(height // 2, 2, width // 2, 2, 3)
    return blocks.mean(axis=(1, 3)).astype(np.uint8)
