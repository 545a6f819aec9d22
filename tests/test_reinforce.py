"""Chapter 1: the learner against formulas, conversations against one process."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cdopt_tutorial.engines import Trace
from cdopt_tutorial.engines.remote import LocalRef
from cdopt_tutorial.reinforce import (
    CONVERSATIONS,
    Actor,
    Agent,
    Episodes,
    Observer,
    Policy,
    ReinforceConfig,
    Score,
    discounted_returns,
    run,
    run_locally,
)
from cdopt_tutorial.reinforce.learner import episode_returns, policy_loss
from cdopt_tutorial.reinforce.waiting import WaitingRoom


def quadratic(rewards, gamma):
    """The definition: for each step, the sum over all later ones."""
    steps = len(rewards)
    return [
        sum(gamma ** (k - t) * rewards[k] for k in range(t, steps))
        for t in range(steps)
    ]


def episodes(lengths, truncated=None, rewards=None, seed=0):
    """Made-up episodes of given lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.as_tensor(lengths)
    shape = int(lengths.max()), len(lengths)
    taken = torch.arange(shape[0])[:, None] < lengths
    rewards = torch.ones(shape) if rewards is None else rewards
    truncated = [False] * len(lengths) if truncated is None else truncated
    return Episodes(
        torch.randn(*shape, 4, generator=generator),
        torch.randint(2, shape, generator=generator),
        rewards * taken,
        lengths,
        torch.as_tensor(truncated),
    )


class TestReturns:
    @given(
        rewards=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60),
        gamma=st.floats(0, 1),
    )
    def test_agree_with_the_quadratic_formula(self, rewards, gamma):
        ours = discounted_returns(torch.tensor(rewards, dtype=torch.float64), gamma)
        torch.testing.assert_close(
            ours, torch.tensor(quadratic(rewards, gamma), dtype=torch.float64),
            rtol=1e-12, atol=1e-9,
        )  # fmt: skip

    def test_take_one_pass(self):
        # The original inserted every return at the front of a list: T passes.
        class Counter(TorchDispatchMode):
            elements = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    self.elements += result.numel()
                return result

        counts = []
        for steps in (100, 200, 300):
            with Counter() as counter:
                discounted_returns(torch.ones(steps), 0.9)
            counts.append(counter.elements)
        assert counts[2] - counts[1] == counts[1] - counts[0] < 500

    @given(
        lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
        gamma=st.floats(0.01, 1),
    )
    def test_of_padded_episodes_are_those_of_each_alone(self, lengths, gamma):
        rewards = torch.linspace(-1, 2, max(lengths) * len(lengths))
        batch = episodes(lengths, rewards=rewards.reshape(max(lengths), len(lengths)))
        returns = episode_returns(batch, gamma)
        for i, length in enumerate(lengths):
            alone = torch.tensor(
                quadratic(batch.rewards[:length, i].double().tolist(), gamma)
            )
            torch.testing.assert_close(returns[:length, i], alone, rtol=1e-5, atol=1e-5)

    def test_go_on_after_the_time_limit_and_stop_after_a_fall(self):
        batch = episodes([500, 500], truncated=[True, False])
        cut, fallen = episode_returns(batch, 0.99).T
        worth = (1 - 0.99**500) / 0.01  # of an episode's start
        assert cut[-1].item() == pytest.approx(1 + 0.99 * worth, rel=1e-4)
        assert fallen[-1].item() == 1
        assert cut[0] > fallen[0]

    def test_of_one_observer_do_not_run_into_anothers(self):
        # The original's R went on from one observer's episode into the next one's.
        gamma, policy = 0.9, Policy(8)
        batch = [episodes([7], seed=1), episodes([3], seed=2)]
        returns = torch.tensor(
            [*quadratic([1.0] * 7, gamma), *quadratic([1.0] * 3, gamma)]
        )
        advantages = (returns - returns.mean()) / returns.std(correction=0)
        scores = policy(torch.cat([e.states[:, 0] for e in batch]))
        actions = torch.cat([e.actions[:, 0] for e in batch])
        log_probs = F.log_softmax(scores, dim=1)[range(10), actions]
        expected = -(log_probs * advantages).mean()
        torch.testing.assert_close(policy_loss(policy, batch, gamma), expected)


class TestPolicy:
    def test_is_the_same_while_it_acts_and_while_it_learns(self):
        # The original's dropout was on while actions were sampled.
        policy, states = Policy(), torch.randn(5, 4)
        policy.train()
        assert torch.equal(policy(states), policy(states))

    def test_actions_follow_the_probabilities(self):
        policy = Policy()
        scores = torch.tensor([[0.0, 1.5]]).expand(20_000, 2)
        share = Actor(policy, seed=1).draw(scores).mean()
        assert share == pytest.approx(
            torch.sigmoid(torch.tensor(1.5)).item(), abs=0.015
        )

    def test_gradient_of_the_loss_prefers_what_paid(self):
        policy = Policy(16)
        batch = episodes([50], rewards=torch.zeros(50, 1))
        paid = replace(batch, rewards=(batch.actions == 1).float())
        before = torch.softmax(policy(batch.states), -1)[..., 1].mean()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        policy_loss(policy, [paid], gamma=0.01).backward()
        optimizer.step()
        assert torch.softmax(policy(batch.states), -1)[..., 1].mean() > before


class TestEnvironment:
    def test_vectorised_cartpole_is_cartpole(self):
        one = gymnasium.make("CartPole-v1")
        many = gymnasium.make_vec(
            "CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"
        )
        assert many.spec.max_episode_steps == one.spec.max_episode_steps == 500
        states, _ = many.reset(seed=3)
        one.reset()
        one.unwrapped.state = np.array(many.unwrapped.state[:, 1])
        for action in np.random.default_rng(0).integers(2, size=500):
            states, rewards, ended, _, _ = many.step(np.full(3, action))
            state, reward, terminated, _, _ = one.step(action)
            np.testing.assert_allclose(states[1], state, rtol=1e-6)
            assert (rewards[1], ended[1]) == (reward, terminated)
            if terminated:
                break
        assert terminated

    def test_every_observer_has_its_own_chance(self):
        # The original gave all observers one seed.
        config = ReinforceConfig(num_observers=3, seed=7)
        seeds = {
            config.seed_of(i, use)
            for i in range(3)
            for use in ("environments", "actions")
        }
        assert len(seeds) == 6
        assert config.seed_of(1, "actions") == replace(config, num_observers=9).seed_of(
            1, "actions"
        )

    def test_lengths_and_totals_count_only_what_belongs_to_an_episode(self):
        agent, batch = one_round(ReinforceConfig(num_observers=1, num_envs=8))
        (done,) = batch
        assert done.totals == done.lengths.tolist()  # CartPole pays 1 a step
        assert len(set(done.totals)) > 1
        assert done.states.shape == (int(done.lengths.max()), 8, 4)


def one_round(config):
    agent = Agent(config)
    observers = [LocalRef(Observer(i, config)) for i in range(config.num_observers)]
    return agent, agent.run_episode(LocalRef(agent), observers)


class TestScore:
    @pytest.mark.parametrize("split", [1, 4])
    def test_does_not_depend_on_how_many_ran_the_episodes(self, split):
        # The original took the minimum over the observers.
        lengths = [10, 20, 30, 40]
        score = Score()
        if split == 1:
            score.add([episodes([length]) for length in lengths], 1.0)
        else:
            score.add([episodes(lengths)], 1.0)
        running = 0.0
        for length in lengths:
            running = 0.05 * length + 0.95 * running
        assert score.running_reward == pytest.approx(running)
        assert (score.mean_reward, score.env_steps) == (25, 100)

    def test_is_solved_by_the_mean_of_a_hundred_episodes(self):
        score = Score()
        score.add([episodes([500] * 99)], 1.0)
        assert not score.solved
        score.add([episodes([500])], 2.0)
        assert score.solved
        assert Score.threshold == 475


class TestConversations:
    FEW = {"num_envs": 2, "max_episodes": 8, "seed": 3}

    @pytest.mark.parametrize("conversation", CONVERSATIONS)
    def test_over_rpc_and_in_one_process_are_the_same(self, conversation):
        config = ReinforceConfig(conversation, num_observers=1, **self.FEW)
        assert_same(run(config), run_locally(config))

    def test_all_four_learn_the_same(self):
        trainings = [
            run_locally(ReinforceConfig(conversation, num_observers=1, **self.FEW))
            for conversation in CONVERSATIONS
        ]
        for other in trainings[1:]:
            assert_same(other, trainings[0])

    def test_two_observers_do_over_rpc_what_they_do_in_one_process(self):
        config = ReinforceConfig("per-step", num_observers=2, **self.FEW)
        assert_same(run(config), run_locally(config))

    def test_an_observer_does_what_it_would_do_alone(self):
        alone = one_round(ReinforceConfig("per-step", num_observers=1, **self.FEW))[1]
        both = one_round(ReinforceConfig("per-step", num_observers=2, **self.FEW))[1]
        for field in ("states", "actions", "rewards", "lengths"):
            assert torch.equal(getattr(both[0], field), getattr(alone[0], field))
        assert torch.equal(
            episode_returns(both[0], 0.99), episode_returns(alone[0], 0.99)
        )
        assert not torch.equal(both[0].states[0], both[1].states[0])

    @pytest.mark.parametrize(
        ("conversation", "calls_a_step", "calls_a_round"),
        [
            ("per-step", 2, 0),
            ("packed", 1, 1),
            ("batched", 1, 2),
            ("local-policy", 0, 2),
        ],
    )
    def test_calls_are_those_that_the_name_says(
        self, conversation, calls_a_step, calls_a_round
    ):
        trace = Trace()
        config = ReinforceConfig(
            conversation, num_observers=1, num_envs=1, max_episodes=3
        )
        score = run(config, trace=trace).score
        to_agent = [
            c for c in trace.calls if c.callee == "agent" and c.method[0] != "_"
        ]
        assert (
            len(to_agent)
            == calls_a_step * score.env_steps + calls_a_round * score.rounds
        )

    def test_a_command_to_an_observer_is_one_call(self):
        # The original called twice for each: rpc_async of an rpc_sync.
        trace = Trace()
        run(ReinforceConfig(num_observers=2, num_envs=1, max_episodes=6), trace=trace)
        commands = [c for c in trace.calls if c.method == "run_episode"]
        assert len(commands) == 2 * 3
        assert {c.caller for c in commands} == {"agent"}

    def test_batched_answers_both_observers_in_one_pass(self):
        passes = []
        config = ReinforceConfig("batched", num_observers=2, num_envs=3)
        agent = Agent(config)
        agent.policy.register_forward_hook(
            lambda *content: passes.append(len(content[1][0]))
        )
        observers = [LocalRef(Observer(i, config)) for i in range(2)]
        first, second = agent.run_episode(LocalRef(agent), observers)
        together = min(len(first.rewards), len(second.rewards))
        alone = max(len(first.rewards), len(second.rewards)) - together
        assert passes == [6] * together + [3] * alone


class TestWaitingRoom:
    @settings(max_examples=30)
    @given(st.permutations(range(4)), st.sets(st.integers(0, 3), max_size=3))
    def test_answers_all_once_the_last_has_come_or_left(self, order, leaving):
        seen = []
        room = WaitingRoom(lambda asked: seen.append(list(asked)) or dict(asked))
        room.expect(range(4))
        futures = {}
        for guest in order:
            if guest in leaving:
                room.leave(guest)
            else:
                futures[guest] = room.enter(guest, guest * 10)
        assert seen == [sorted(futures)]
        assert {guest: future.wait() for guest, future in futures.items()} == {
            guest: guest * 10 for guest in futures
        }

    def test_an_error_reaches_everyone_who_waits(self):
        def answer(_):
            raise ArithmeticError("no answer")

        room = WaitingRoom(answer)
        room.expect([1, 2])
        futures = [room.enter(1, None), room.enter(2, None)]
        for future in futures:
            with pytest.raises(Exception, match="no answer"):
                future.wait()


@pytest.mark.parametrize("conversation", ["batched", "local-policy"])
def test_it_solves_cartpole_over_rpc(conversation):
    score = run(ReinforceConfig(conversation, num_observers=2, seed=2)).score
    assert score.solved
    assert sum(score.rewards[-100:]) / 100 >= 475
    assert len(score.rewards) < 3000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"conversation": "shouting"},
            "must be one of per-step, packed, batched, local-policy",
        ),
        ({"num_observers": 0}, "num_observers is 0"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"gamma": 1.2}, "gamma is 1.2, but must be above 0 and at most 1"),
        ({"gamma": 0.0}, "gamma is 0.0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"log_interval": 0}, "log_interval is 0"),
    ],
)
def test_a_config_out_of_range_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ReinforceConfig(**change)


def assert_same(one, other):
    assert one.score.rewards == other.score.rewards
    assert one.score.env_steps == other.score.env_steps
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=1e-5, atol=1e-6)
