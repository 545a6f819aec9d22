"""Chapter 1: the learner against formulas, conversations against one process.

And one process against a program that shares nothing with it.
"""

import re
import time
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import reinforce_twin
import torch
from roles import raise_error
from running import LONG
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial.calls import network, reference
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.probes.attach import wrap
from cdopt_tutorial.reinforce import (
    CONVERSATIONS,
    Agent,
    Episodes,
    Observer,
    ReinforceConfig,
    Round,
    Score,
    agent,
    run,
    run_locally,
    speed,
    system,
)
from cdopt_tutorial.reinforce.learner import episode_returns
from cdopt_tutorial.run import Role, Trace, WorkerError, launch, serve


def episodes(lengths, truncated=None, rewards=None, seed=0):
    """Made-up episodes of given lengths."""
    generator, lengths = torch.Generator().manual_seed(seed), torch.as_tensor(lengths)
    shape = int(lengths.max()), len(lengths)
    taken = torch.arange(shape[0])[:, None] < lengths
    return Episodes(
        torch.randn(*shape, 4, generator=generator),
        torch.randint(2, shape, generator=generator),
        (torch.ones(shape) if rewards is None else rewards) * taken,
        lengths,
        lengths < 0 if truncated is None else torch.as_tensor(truncated),
    )


class TestReturns:
    def test_go_on_after_the_time_limit_and_stop_after_a_fall(self):
        batch = episodes([500, 500], truncated=[True, False])
        cut, fallen = episode_returns(batch, 0.99).T
        worth = (1 - 0.99**500) / 0.01  # of an episode's start
        assert cut[-1].item() == pytest.approx(1 + 0.99 * worth, rel=1e-4)
        assert fallen[-1].item() == 1
        assert cut[0] > fallen[0]


class TestEnvironment:
    def test_every_observer_has_its_own_chance(self):
        # The original gave all observers one seed.
        config = ReinforceConfig("per-step", num_observers=3, num_envs=64, seed=7)
        uses = ("environments", "actions")
        assert len({config.seed_of(i, use) for i in range(3) for use in uses}) == 6
        more = replace(config, num_observers=9)
        assert config.seed_of(1, "actions") == more.seed_of(1, "actions")
        alike, agent = np.zeros((64, 4), dtype=np.float32), Agent(config)
        assert len({agent.select_action(i, alike).tobytes() for i in range(3)}) == 3
        starts = set()
        for observer in [Observer(i, config) for i in range(3)]:
            for _ in range(2):  # in each round, too
                observer.run_episode(reference(pusher := Pusher()))
                starts.add(pusher.states[0].tobytes())
        assert len(starts) == 6

    def test_a_fall_in_the_last_step_is_a_fall(self, short_episodes):
        config = ReinforceConfig("per-step", 1, num_envs=1)
        (length,), _ = Observer(0, config).run_episode(reference(Pusher()))
        short_episodes(int(length))
        assert Observer(0, config).run_episode(reference(Pusher())) == (length, False)
        short_episodes(int(length) - 1)
        cut = Observer(0, config).run_episode(reference(Pusher()))
        assert cut == (length - 1, True)


@pytest.fixture
def short_episodes(monkeypatch):
    """Ends episodes after so many steps."""

    def limit(steps):
        name, cartpole = f"Short{steps}-v0", gymnasium.spec("CartPole-v1")
        spec = replace(cartpole, id=name, max_episode_steps=steps)
        monkeypatch.setitem(gymnasium.registry, name, spec)
        monkeypatch.setattr(agent, "ENVIRONMENT", name)
        return name

    return limit


class Pusher:
    """In the agent's place: pushes to the right, and keeps the states it was sent."""

    def __init__(self):
        self.states = []

    def select_action(self, observer, states):
        self.states.append(states)
        return np.ones(len(states), dtype=np.int64)

    def report_reward(self, observer, rewards):
        pass


class TestScore:
    @pytest.mark.parametrize(
        "rounds", [([[10, 20]], [[30, 60]]), ([[10], [20]], [[30], [60]])]
    )
    def test_does_not_depend_on_how_many_ran_the_episodes(self, rounds):
        # The original took the minimum over the observers.
        score = Score()
        first, second = (score.add(list(map(episodes, batch))) for batch in rounds)
        assert first == Round(1, 2, 30, last_reward=15.0, mean_reward=15.0)
        assert second == Round(2, 4, 120, last_reward=45.0, mean_reward=30.0)

    def test_is_solved_by_the_mean_of_a_hundred_episodes(self):
        """Of the last hundred, and of no fewer."""
        score, solved = Score(), []
        for lengths in ([500] * 99, [10], [475] * 99, [475], [474]):
            score.add([episodes(lengths)])
            solved.append(score.solved)
        assert solved == [False, True, False, True, False]
        assert Score.threshold == 475

    @pytest.mark.parametrize(("most", "played"), [(60, 60), (300, 100)])
    def test_ends_the_run_once_it_is_solved(self, most, played, monkeypatch):
        # Any hundred episodes reach it.
        monkeypatch.setattr(ReinforceConfig, "threshold", 1.0)
        config = ReinforceConfig(num_observers=1, num_envs=20, max_episodes=most)
        found = run_locally(config)
        assert len(found.score.rewards) == played
        assert found.score.solved == (played == 100)


class TestTwin:
    HOW = {"num_envs": 3, "seed": 5, "max_episodes": 36, "gamma": 0.9, "lr": 0.02}

    @pytest.mark.parametrize("conversation", CONVERSATIONS)
    def test_learns_the_same_without_anything_of_the_package(
        self, conversation, short_episodes
    ):
        environment = short_episodes(40)  # some fall, some are cut
        config = ReinforceConfig(conversation, num_observers=2, **self.HOW)
        ours = run_locally(config)
        assert min(ours.score.rewards) < max(ours.score.rewards) == 40
        rewards, env_steps, weights = reinforce_twin.train(config, environment, 6)
        assert ours.score.rewards == rewards
        assert ours.score.env_steps == env_steps
        # Its products and its loss are other ones, so they round otherwise.
        for one, other in zip(ours.weights.values(), weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


FEW = {"num_observers": 2, "num_envs": 2, "max_episodes": 8, "seed": 3}


def attach_fault(fault):
    """Attached: the second observer has a fault in its first round."""

    def play(run_episode, observer, *args):
        if network.current().own_name() == "observer1":
            fault()
        return run_episode(observer, *args)

    wrap(Observer.run_episode, play)


HANGS, SILENT = partial(time.sleep, LONG), "did not answer a call that|kept others wait"


@pytest.fixture(scope="module")
def conversed():
    """All conversations by RPC, one after another: trainings, calls and reports."""
    configs = [ReinforceConfig(conversation, **FEW) for conversation in CONVERSATIONS]
    roles = {"agent": Role(lambda: [system.run_agent(each) for each in configs])}
    roles |= {f"observer{i}": Role(serve) for i in range(2)}
    trace, reports = Trace(), []
    watching = {"trace": trace, "on_report": lambda *report: reports.append(report)}
    trainings = launch(roles, rpc_threads=2, **watching)["agent"]
    return dict(zip(CONVERSATIONS, trainings, strict=True)), trace.calls, reports


@pytest.mark.xdist_group("conversations")
class TestConversations:
    def test_over_rpc_and_in_one_process_are_the_same(self, conversed):
        trainings, _, reports = conversed
        rounds = []
        for conversation, remote in trainings.items():
            begin = time.perf_counter()
            config = ReinforceConfig(conversation, **FEW)
            local = run_locally(config)
            assert 0 < local.score.seconds < time.perf_counter() - begin
            assert remote.score.rewards == local.score.rewards
            assert max_difference(remote.weights, local.weights) == 0
            assert remote.rounds == local.rounds
            assert [record.number for record in local.rounds] == [1, 2]
            rounds += local.rounds
        assert reports == [("agent", each) for each in rounds]

    def test_threads_of_the_caller_do_not_matter(self, monkeypatch):
        """More would cut the sums over a long round, and round them otherwise."""

        def threads(roles, **_):
            return {"agent": [role.num_threads for role in roles.values()]}

        monkeypatch.setattr(system, "launch", threads)
        assert run(ReinforceConfig()) == [1, 1, 1]
        monkeypatch.setattr(system, "run_agent", lambda *_: torch.get_num_threads())
        with set_torch_threads(3):
            assert run_locally(ReinforceConfig()) == 1
            assert torch.get_num_threads() == 3

    def test_a_command_to_an_observer_is_one_call(self, conversed):
        # The original called twice for each: rpc_async of an rpc_sync.
        _, calls, _ = conversed
        commands = [c for c in calls if c.method == "run_episode"]
        assert len(commands) == len(CONVERSATIONS) * 2 * 2
        assert {c.caller for c in commands} == {"agent"}
        assert {c.callee for c in commands} == {"observer0", "observer1"}

    @pytest.mark.parametrize(
        "fault, said", [(HANGS, SILENT), (raise_error, "raised ArithmeticError")]
    )
    def test_an_observer_that_hangs_is_named_and_not_who_waits_for_it(
        self, fault, said
    ):
        """Or that fails: nobody may wait for it until a call runs out of time."""
        config = ReinforceConfig("batched", num_envs=1, max_episodes=2)
        with pytest.raises(WorkerError) as caught:
            run(config, attach=partial(attach_fault, fault), rpc_timeout=8)
        assert caught.value.worker == "observer1"
        assert "in play" in caught.value.details  # where it is
        # Either call to one that hangs may be the first to run out of time.
        assert re.match(f"observer1 ({said})", caught.value.headline)

    def test_batched_answers_both_observers_in_one_pass(self):
        passes = []
        config = ReinforceConfig("batched", num_observers=2, num_envs=3)
        agent = Agent(config)
        note = lambda _, inputs, __: passes.append(len(inputs[0]))  # noqa: E731
        agent.policy.register_forward_hook(note)
        observers = [reference(Observer(i, config)) for i in range(2)]
        first, second = agent.run_episode(reference(agent), observers)
        together = min(len(first.rewards), len(second.rewards))
        alone = max(len(first.rewards), len(second.rewards)) - together
        assert passes == [6] * together + [3] * alone


class TestSpeed:
    def test_is_of_each_run_and_repeat_and_no_more_than_its_steps_allow(self):
        limits = {"max_episodes": 2, "cost_ms": 5.0}
        apart = speed.SlowConfig("per-step", 2, 1, **limits)
        alone = speed.SlowConfig("per-step", 1, 2, **limits)
        runs = [(system.run_agent, apart), (speed.run_alone, alone)]
        for most, speeds in zip((400, 200), speed.measure(runs, 2), strict=True):
            assert len(speeds) == 2 and 0 < min(speeds) <= max(speeds) < most

    def test_observers_that_take_turns_play_and_learn_the_same(self):
        config = ReinforceConfig(num_envs=2, max_episodes=20)
        in_turn = speed.run_alone(config)
        assert in_turn.score.rewards == run_locally(config).score.rewards
