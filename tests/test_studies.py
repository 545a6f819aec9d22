"""Long studies: finished runs are kept, and each kind is tuned by itself."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdopt_tutorial.bench import lag, study
from cdopt_tutorial.bench.runs import keep
from cdopt_tutorial.parameter_server.study import STUDY as RECURRENT
from cdopt_tutorial.rollouts import age, speed
from cdopt_tutorial.sharding.study import STUDY as TRANSFORMERS


def noted(folder: str, number: int) -> dict:
    """Adds a line to a file each time it runs."""
    with open(f"{folder}/ran", "a") as file:
        file.write(f"{number}\n")
    return {"square": number**2}


def test_what_was_killed_goes_on_with_what_is_missing(tmp_path):
    jobs = [{"folder": str(tmp_path), "number": number} for number in (3, 1, 2)]
    path, ran, lines = tmp_path / "runs", tmp_path / "ran", []
    expected = [job | {"square": job["number"] ** 2} for job in jobs]
    assert keep(None, noted, jobs, lines.append) == expected
    assert keep(path, noted, jobs, lines.append) == expected
    ran.unlink()
    path.write_text(path.read_text()[:-9])  # in the middle of the last line
    (lost,) = {1, 2, 3} - {
        json.loads(line)[0]["number"] for line in path.read_text().splitlines()[:2]
    }
    more = [*jobs, {"folder": str(tmp_path), "number": 4}]
    found = keep(path, noted, more, lines.append)
    assert [each["square"] for each in found] == [9, 1, 4, 16]
    assert sorted(map(int, ran.read_text().split())) == sorted([lost, 4])
    ran.unlink()
    assert keep(path, noted, more, lines.append) == found and not ran.exists()
    assert lines[-1] == "0 runs, 4 are kept already"


@settings(deadline=None, max_examples=40)
@given(
    best=st.lists(st.sampled_from(range(len(study.RATES))), min_size=2, max_size=2),
    how=st.sampled_from(study.SCHEDULES),
)
def test_a_kind_is_tuned_to_its_best_rate_and_schedule_wherever_they_are(best, how):
    ran = []

    def train(chosen, seeds):
        ran.extend(chosen)
        return {of: [{"tuning": loss(of)} for _ in seeds] for of in chosen}

    def loss(of):
        kind, lr, *schedule = of
        return abs(study.RATES.index(lr) - best[int(kind)]) + (tuple(schedule) != how)

    found = study.tune(train, ("0", "1"), (7, 8))
    assert found == [(str(k), study.RATES[best[k]], *how) for k in (0, 1)]
    assert len(ran) == len(set(ran))


def test_seeds_of_tuning_are_not_those_of_what_is_reported():
    assert not set(study.TUNING_SEEDS) & set(study.SEEDS)
    assert not set(lag.TUNING_SEEDS) & set(lag.SEEDS)


@pytest.mark.parametrize("of", [RECURRENT, TRANSFORMERS], ids=lambda of: of.package)
def test_what_is_stored_was_chosen_by_its_runs_and_is_the_best_of_each(of):
    kept = of.stored()
    names = "kind", "lr", "decay", "warm_up", "seed"
    tuned = {tuple(run[name] for name in names): run for run in kept["tuned"]}

    def train(chosen, seeds):
        return {of: [tuned[*of, seed] for seed in seeds] for of in chosen}

    chosen = study.tune(train, of.kinds, study.TUNING_SEEDS)
    assert [list(setting) for setting in chosen] == kept["chosen"]
    assert len(kept["tuned"]) == len(tuned)
    expected = [(*setting, seed) for setting in chosen for seed in study.SEEDS]
    assert [tuple(run[name] for name in names) for run in kept["runs"]] == expected
    for run in kept["runs"]:
        assert min(run["curve"]) == [run["tuning"], run["test"], run["steps"]]


def test_a_repeat_that_gives_no_number_is_infinitely_far(monkeypatch):
    for value, apart in (math.nan, math.inf), (math.inf, math.inf):
        again = [{"curve": [[value, 4.0, 118]]}]
        monkeypatch.setattr("cdopt_tutorial.study.share", lambda *_, a=again: a)
        assert RECURRENT.repeat(("free",), 118) == apart


@pytest.mark.parametrize("most", [3, 8])
def test_a_rollout_of_a_made_up_schedule_is_as_old_as_it_says(most):
    rows = [row for row, _ in zip(age.schedule(most), range(20), strict=False)]
    for update, row in enumerate(rows):
        assert row == {0: max(0, update - most), 1: max(0, update - most)}


def test_what_lag_costs_was_stored_by_its_bench():
    """Each way with all seeds, at the best rate for other seeds."""
    stored = speed.stored("lag")
    for environment in lag.ENVIRONMENTS:
        for lags in lag.LAGS:
            for clip in lag.CLIPS.values():
                way = {"environment": environment, "lag": lags, "clip": clip}
                runs = [run for run in stored["runs"] if way.items() <= run.items()]
                tuned = [run for run in stored["tuned"] if way.items() <= run.items()]
                if not lags and not clip:
                    assert not runs and not tuned
                    continue
                assert [run["seed"] for run in runs] == list(lag.SEEDS)
                assert {run["lr"] for run in runs} == {lag._best(tuned)}
                assert all(run["solved"] or run["episodes"] >= 6_400 for run in runs)
