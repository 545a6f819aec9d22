"""Chapter 8: runs ahead against their replay in one process, and against chapter 1."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdopt_tutorial import reinforce, rollouts
from cdopt_tutorial.calls.errors import WorkerSilent
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.reinforce.learner import policy_loss
from cdopt_tutorial.rollouts import Learner, Observer
from cdopt_tutorial.rollouts.system import AheadAgent
from cdopt_tutorial.rollouts.waiting import wait_ms
from cdopt_tutorial.run import WorkerError

pytestmark = pytest.mark.usefixtures("limited")
FEW = {"num_envs": 2, "max_episodes": 24, "seed": 3}


def config(num_observers=2, max_lag=1, **more):
    return rollouts.RolloutsConfig(num_observers, max_lag=max_lag, **FEW | more)


def equal(one, other):
    same = one.score.rewards == other.score.rewards and one.rounds == other.rounds
    return same and max_difference(one.weights, other.weights) == 0


@pytest.mark.parametrize("num_observers", [1, 3])
def test_in_one_process_and_in_step_it_is_chapter_1(num_observers):
    settings = config(num_observers, max_lag=0)
    found, first = rollouts.run_locally(settings), reinforce.run_locally(settings)
    assert found.score.rewards == first.score.rewards
    assert max_difference(found.weights, first.weights) == 0
    assert {update.max_ratio for update in found.rounds} == {1.0}


@pytest.mark.parametrize(
    "num_observers, max_lag, more",
    [
        (2, 0, {}),
        (3, 1, {"clip": 0}),
        (2, 4, {"step_ms": 0.2, "waits": "heavy"}),
    ],
)
def test_a_run_and_its_replay_in_one_process_are_the_same(num_observers, max_lag, more):
    settings = config(num_observers, max_lag, **more)
    found = rollouts.run(settings)
    assert equal(found, rollouts.run_locally(settings, found.schedule))
    assert found.lags.total() * settings.num_envs == len(found.score.rewards)
    assert len(found.score.rewards) == settings.max_episodes
    assert found.score.threshold == settings.threshold
    assert max(found.lags) <= max_lag
    if max_lag == 0:
        assert equal(found, rollouts.run_locally(settings))
        assert {update.max_ratio for update in found.rounds} == {1.0}


class Play:
    """Observers that begin and hand over in an order that a test chooses."""

    def __init__(self, settings):
        self.agent, self.lags = AheadAgent(settings), []
        numbers = range(settings.num_observers)
        self.observers = [Observer(number, settings) for number in numbers]
        self.answers = [self.agent.begin(number) for number in numbers]

    def hand_over(self, number):
        """What an observer does, if it is not made to wait."""
        if not self.answers[number].done():
            return False
        update, version, weights = self.answers[number].wait()
        rollout = self.observers[number].play(version, weights)
        assert rollout.number == update  # one for each, and in order
        self.agent.hand_over(update, rollout)
        self.answers[number] = self.agent.begin(number)
        return True

    def learn(self):
        """An update, if all of its rollouts have come."""
        if self.agent.is_complete():
            lag, _ = self.agent.finish_episode(self.agent.next_batch())
            self.lags.append(lag)


class TestAheadAgent:
    @settings(max_examples=12)
    @given(
        order=st.lists(st.integers(0, 3), min_size=20, max_size=40),
        max_lag=st.integers(0, 3),
    )
    def test_in_any_order_observers_play_ahead_by_max_lag_and_no_further(
        self, order, max_lag
    ):
        play = Play(config(3, max_lag, num_envs=1))
        for turn in order:
            if turn == 3:
                play.learn()
                continue
            ahead = play.observers[turn]._played - play.agent.version
            assert play.hand_over(turn) == (ahead <= max_lag)
        assert max(play.lags, default=0) <= max_lag

    @pytest.mark.parametrize(("asked", "late"), [([], 0), ([0], 0), ([1], 1)])
    def test_who_has_an_update_and_else_who_never_asks_is_named(
        self, asked, late, monkeypatch
    ):
        monkeypatch.setattr("cdopt_tutorial.rollouts.system.patience", lambda: 0.1)
        agent = AheadAgent(config())
        for observer in asked:
            agent.begin(observer)
        said = f"^observer{late} did not hand over a rollout within 0.1 s$"
        with pytest.raises(WorkerSilent, match=said):
            agent.next_batch()


class TestLearner:
    def test_weighs_each_step_by_the_probabilities_that_changed(self):
        settings = config(1, clip=1.01, lr=0.3)
        learner, observer = Learner(settings), Observer(0, settings)
        learner.finish_episode([observer.play(0, learner.kept[0])])
        late, policy = observer.play(0, learner.kept[0]), reinforce.Policy()
        states, actions = late.states[late.taken], late.actions[late.taken][:, None]
        chances = []
        for version in (0, 1):
            policy.load_state_dict(learner.kept[version])
            chances.append(policy(states).softmax(1).gather(1, actions)[:, 0])
        ratios = (chances[1] / chances[0]).detach()
        assert ratios.min() < 1 < 1.01 < ratios.max()
        weighting = ratios.clamp(max=1.01)
        policy_loss(policy, [late], settings.gamma, weighting).backward()
        lag, most = learner.finish_episode([late])
        assert (lag, most) == (1, pytest.approx(ratios.max().item(), rel=1e-5))
        ours = learner.policy.parameters()
        for one, other in zip(ours, policy.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        learner.finish_episode([observer.play(1, learner.kept[1])])
        assert list(learner.kept) == [2, 3]  # no more than may still play

    @pytest.mark.parametrize(
        ("said", "wrong"),
        [
            ({"version": 1}, "not played by the weights of version 1: .* differ"),
            ({"log_probs": torch.tensor(math.nan)}, "not played by .* differ by nan"),
            ({"version": 2}, r"is of version 2, but only \[0, 1\] are known"),
            ({"number": 2}, "is its number 2, but 1 was expected"),
            ({"number": 0}, "is its number 0, but 1 was expected"),
        ],
    )
    def test_refuses_a_rollout_that_is_not_what_it_says(self, said, wrong):
        settings = config(2)
        learner = Learner(settings)
        observers, weights = [Observer(n, settings) for n in range(2)], learner.kept[0]
        learner.finish_episode([each.play(0, weights) for each in observers])
        good, rollout = (each.play(0, weights) for each in observers)
        with pytest.raises(RuntimeError, match=f"observer1 for update 1 .*{wrong}"):
            learner.finish_episode([good, replace(rollout, **said)])
        learner.finish_episode([good, rollout])  # nothing was counted


# Pareto's mean is shape / (shape - 1) times its least value.
@pytest.mark.parametrize("waits, least", [("fixed", 4.0), ("heavy", 4.0 * 0.5 / 1.5)])
def test_waits_are_as_long_as_the_config_says(waits, least):
    clock = np.random.default_rng(1)
    drawn = np.array([wait_ms(4.0, waits, clock) for _ in range(100_000)])
    middle = 4.0 if waits == "fixed" else least * 2 ** (1 / 1.5)
    assert drawn.min() == pytest.approx(least, rel=1e-3)
    assert np.median(drawn) == pytest.approx(middle, rel=0.02)


def fail(self, *_):
    raise ArithmeticError("of its own")


def break_play():
    Observer.play = fail


def test_an_observer_that_fails_ends_the_run_and_is_named():
    with pytest.raises(WorkerError, match="of its own") as caught:
        rollouts.run(config(), attach=break_play)
    assert caught.value.worker in ("observer0", "observer1")
