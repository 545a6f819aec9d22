"""Chapter 8's second environment moves as gymnasium's own."""

import gymnasium
import numpy as np
import pytest

from cdopt_tutorial.rollouts import RolloutsConfig
from cdopt_tutorial.rollouts.acrobot import Acrobots


@pytest.mark.parametrize("seed", range(4))
def test_each_moves_as_gymnasiums_own(seed):
    dice, many = np.random.default_rng(seed), Acrobots(5)
    many.np_random = np.random.default_rng(seed)
    states, _ = many.reset()
    each = [gymnasium.make("Acrobot-v1") for _ in range(5)]
    for one, state in zip(each, many._state.T, strict=True):
        one.reset()
        one.unwrapped.state = state.copy()
    up = np.zeros(5, bool)
    for _ in range(500):
        # With the lower link's own motion it swings up soon.
        actions = np.where(states[:, 5] > 0, 2, 0)
        actions[dice.random(5) < 0.1] = 1
        states, rewards, over, late, _ = many.step(actions)
        for i in np.flatnonzero(~up):
            state, reward, done, truncated, _ = each[i].step(actions[i])
            np.testing.assert_allclose(states[i], state, rtol=0, atol=1e-6)
            assert (rewards[i], over[i], late[i]) == (reward, done, truncated)
            each[i].unwrapped.state = many._state[:, i].copy()  # chaos: start level
        up |= over
        if up.all():
            break
    assert up.any()
    assert many._steps == 500 or not late.any()


def test_it_has_its_own_threshold_and_three_actions():
    config = RolloutsConfig(environment="Acrobot-v1")
    assert config.threshold == -100 and config.make_policy().affine2.out_features == 3


@pytest.mark.parametrize(
    ("of", "wrong"),
    [
        ({"step_ms": 1.0}, "step_ms is 1.0, but must be 0 where it is not CartPole"),
        ({"environment": "Pendulum-v1"}, "environment is 'Pendulum-v1', but must be"),
    ],
)
def test_what_it_cannot_do_is_refused(of, wrong):
    with pytest.raises(ValueError, match=wrong):
        RolloutsConfig(**{"environment": "Acrobot-v1"} | of)
