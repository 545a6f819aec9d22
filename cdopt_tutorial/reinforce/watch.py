"""Watch a policy: frames of CartPole, before and after training."""

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


def frames(weights: Mapping[str, Tensor]) -> list[NDArray[np.uint8]]:
    """Pictures of a policy's episode, (200, 300, 3) uint8 each.

    In training an episode ends when the pole leans by 12°; here it falls all the way.
    """
    # gymnasium draws with pygame, which prints a greeting and looks for a screen.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    policy = Policy()
    policy.load_state_dict(weights)
    actor = Actor(policy, SEED)
    env = gymnasium.make(ENVIRONMENT, render_mode="rgb_array")
    env.set_wrapper_attr("theta_threshold_radians", np.pi / 2)
    state, _ = env.reset(seed=SEED)
    pictures, over, step = [], False, 0
    while not over:
        if step % EVERY == 0:
            blocks = np.asarray(env.render()).reshape(200, 2, 300, 2, 3)
            pictures.append(blocks.mean(axis=(1, 3)).astype(np.uint8))
        state, _, terminated, truncated, _ = env.step(actor.select(state[None])[0])
        over, step = terminated or truncated, step + 1
    env.close()
    return pictures


def side_by_side(left: list[NDArray], right: list[NDArray]) -> list[NDArray]:
    """One film of two, as long as the longer one; the shorter one is repeated."""
    return [
        np.concatenate([left[time % len(left)], right[time % len(right)]], axis=1)
        for time in range(max(len(left), len(right)))
    ]
