"""Chapter 8's predictions against sums by hand, and both commands."""

import json
import random
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdopt_tutorial.cli import main
from cdopt_tutorial.rollouts import RolloutsConfig, speed
from cdopt_tutorial.rollouts.predict import Costs, predict
from cdopt_tutorial.rollouts.simulator import wait_ms

NAMES = ("call", "play", "forward", "step", "trip", "update", "rollout")
FREE = Costs(**dict.fromkeys(NAMES, 0.0), cores=2, num_envs=1, lengths=[(20, 20)])


def config(num_observers=1, max_lag=0, updates=10, **more):
    size = {"num_envs": 1, "max_episodes": updates * num_observers}
    size |= dict.fromkeys(("num_observers", "num_rollouts"), num_observers)
    return RolloutsConfig(max_lag=max_lag, **size | more)


def waits(of, number, rollouts):
    """Seconds that each rollout of an observer waits, by its simulator's own clock."""
    stream = np.random.default_rng(of.seed_of(number, "environments"))
    (clock,) = stream.spawn(1)
    drawn = [wait_ms(of.step_ms, of.waits, clock) for _ in range(20 * rollouts)]
    return np.array(drawn).reshape(rollouts, 20).sum(1) / 1000


class TestPredict:
    @pytest.mark.parametrize("kind", ["fixed", "heavy"])
    def test_in_step_each_update_waits_for_its_slowest_observer(self, kind):
        of = config(4, step_ms=3.0, waits=kind, seed=5)
        sums = np.array([waits(of, number, 10) for number in range(4)])
        expected = 4 * 10 * 20 / sums.max(0).sum()
        found, lag = predict(FREE, of)
        assert found == pytest.approx(expected) and lag == 0
        alone = predict(FREE, of, alone=True)
        assert alone[0] == pytest.approx(4 * 10 * 20 / sums.sum())

    def test_far_ahead_a_run_takes_as_long_as_its_slowest_observer(self):
        of = config(4, max_lag=10, step_ms=3.0, waits="heavy", seed=5)
        sums = np.array([waits(of, number, 10) for number in range(4)])
        expected = 4 * 10 * 20 / sums.sum(1).max()
        assert predict(FREE, of)[0] == pytest.approx(expected)

    def test_the_parts_of_one_observer_add_up(self):
        seconds = (0.004, 0.002, 0.0003, 0.0002, 0.0001, 0.01, 0.003)
        costs = replace(FREE, **dict(zip(NAMES, seconds, strict=True)))
        of = config(step_ms=5.0, updates=7)
        # Half of both calls is over while the agent learns.
        parts = 0.002 + 20 * 0.0056 + 0.01 + 0.003
        assert predict(costs, of)[0] == pytest.approx(20 / (parts + 0.004 / 2))
        assert predict(costs, of, alone=True)[0] == pytest.approx(20 / parts)
        assert costs.parts(of) == pytest.approx(
            {"step": 0.0006, "rollout": 0.018, "waits": 0.1, "update": 0.013}
        )

    def test_where_nothing_waits_the_cores_are_the_bound(self):
        costs = replace(FREE, step=0.001, update=0.002)
        of = config(8, max_lag=4, updates=50)
        bounds = costs.bounds(of)
        assert min(bounds, key=bounds.get) == "cores"
        found = predict(costs, of)[0]
        assert bounds["cores"] * 0.95 < found < bounds["cores"] * 1.01
        assert costs.knee(of)[0] == 2

    def test_where_updates_are_slow_the_agent_is_the_bound_and_all_are_old(self):
        costs = replace(FREE, update=1.0)
        of = config(2, max_lag=3, updates=50, step_ms=5.0)
        found, bounds = predict(costs, of), costs.bounds(of)
        assert min(bounds, key=bounds.get) == "agent"
        assert found[0] == pytest.approx(bounds["agent"], rel=0.01)
        assert found[1] == pytest.approx(3, abs=0.2)
        assert costs.knee(of) == (1, "agent")

    @settings(max_examples=25, deadline=None)
    @given(
        observers=st.integers(1, 6),
        max_lag=st.integers(0, 3),
        step_ms=st.sampled_from([0.0, 2.0]),
        kind=st.sampled_from(["fixed", "heavy"]),
        seed=st.integers(0, 99),
    )
    def test_no_lag_is_above_the_limit_nor_a_speed_above_the_bounds(
        self, observers, max_lag, step_ms, kind, seed
    ):
        costs = replace(FREE, call=1e-3, step=1e-4, update=2e-3, rollout=1e-3)
        of = config(observers, max_lag, step_ms=step_ms, waits=kind, seed=seed)
        found = predict(costs, of)
        assert 0 <= found[1] <= max_lag
        bounds = costs.bounds(of)
        if kind == "fixed":  # else the mean of few waits is not theirs
            assert found[0] <= min(bounds.values()) * (1 + 1e-9)
        assert found == predict(costs, of)

    def test_costs_of_other_environments_are_refused(self):
        with pytest.raises(ValueError, match="num_envs is 3, but must be 1"):
            predict(FREE, config(num_envs=3))


def test_the_stored_predictions_are_those_of_the_package():
    stored = speed.stored()
    costs = Costs(**stored["costs"])
    for run in random.Random(0).sample(stored["runs"], 12):
        names = "waits", "step_ms", "max_lag", "num_observers"
        how = {name: run[name] for name in names}
        episodes = 16 * run["num_observers"]
        of = RolloutsConfig(num_envs=1, max_episodes=episodes, **how)
        pairs = zip(run["predicted"], run["predicted_lag"], strict=True)
        for turn, pair in enumerate(pairs):
            found = predict(costs, replace(of, seed=of.seed + turn), run["alone"])
            assert found == pytest.approx(pair)


def test_what_is_calibrated_is_predicted_from(tmp_path, capsys):
    costs, file = tmp_path / "costs.json", tmp_path / "found.json"
    assert main(["calibrate", "--num-envs", "1", "--json", str(costs)]) == 0
    written = json.loads(costs.read_text())
    assert set(written) == set(asdict(FREE)) and min(map(written.get, NAMES)) >= 0
    assert all(steps == total >= 8 for steps, total in written["lengths"])
    size = ["--num-envs", "1", "--max-episodes", "40", "--num-observers", "4"]
    how = ["--max-lag", "2", "--step-ms", "5", "--json", str(file)]
    capsys.readouterr()
    assert main(["predict", "rollouts", "--costs", str(costs), *size, *how]) == 0
    found, said = json.loads(file.read_text()), capsys.readouterr().out
    assert set(found["predicted"]) == {"one process", "in step", "ahead, max_lag 2"}
    assert found["limit"] == min(found["bounds"], key=found["bounds"].get)
    assert f"what limits: {found['limit']}; from {found['knee']} observers on" in said


@pytest.mark.parametrize("text", ["no json", '{"call": 1}'])
def test_a_file_that_is_none_of_costs_is_refused_in_a_line(text, tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text(text)
    assert main(["predict", "rollouts", "--costs", str(costs)]) == 2
    said = capsys.readouterr().err
    assert "is no file of `calibrate`" in said and said.count("\n") == 1
