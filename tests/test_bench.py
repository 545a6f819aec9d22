"""What the benches share, and what each reports of a run; no time is asserted."""

from functools import partial
from types import SimpleNamespace

import pytest

from cdopt_tutorial.bench import rows, speed
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.reinforce import ReinforceConfig


class TestRows:
    VALUES = {
        "b": {"x": [4.0, 4.0, 9.0]},
        "a": {"x": [5.0, 1.0, 2.0], "own": [6.0], "unnamed": [1.0]},
        "c": {"own": [3.0]},
    }

    def test_are_medians_over_the_first_ones_with_least_and_most(self):
        assert rows.rows(self.VALUES, {"x": "s", "own": "B"}) == [
            rows.Row("b: x", 4.0, "s", "b: x", 1.0, 4.0, 9.0),
            rows.Row("a: x", 2.0, "s", "b: x", 0.5, 1.0, 5.0),
            rows.Row("a: own", 6.0, "B", "a: own", 1.0, 6.0, 6.0),
            rows.Row("c: own", 3.0, "B", "a: own", 0.5, 3.0, 3.0),
        ]

    def test_are_of_variants_that_take_turns(self):
        order, lines = [], []
        variants = {
            name: lambda turn, name=name: order.append((name, turn)) or {"x": turn}
            for name in "ab"
        }
        found, more = rows.sweep([variants], {"x": "s"}, False, lines.append)
        assert order == [(name, turn) for turn in range(1, 6) for name in "ab"]
        assert lines == [f"{name}, turn {turn}" for name, turn in order]
        assert more == {"values": {name: {"x": [1, 2, 3, 4, 5]} for name in "ab"}}
        assert found == rows.rows(more["values"], {"x": "s"})

    def test_are_written_with_the_machine_and_shown_in_columns(self):
        found = rows.rows(self.VALUES, {"x": "s"})
        written = rows.report(found, values=self.VALUES)
        assert written["rows"][1] == {
            "name": "a: x", "value": 2.0, "unit": "s", "baseline": "b: x", "ratio": 0.5,
            "least": 1.0, "most": 5.0,
        }  # fmt: skip
        assert written["values"] == self.VALUES
        assert set(written["machine"]) == {"cores", "python", "torch", "system"}
        lines = rows.table(found).splitlines()
        assert lines[1].split() == "a: x 2 (1 to 5) s 0.5 x b: x".split()
        assert len(lines) == 2 and len(set(map(len, lines))) == 1


# `shards` has tests of its own.
@pytest.mark.usefixtures("engines_installed")
@pytest.mark.parametrize("name", ["reinforce", "rnn", "hybrid", "engines", "rollouts"])
def test_a_smoke_run_has_rows_with_ratios(name, written, monkeypatch):
    monkeypatch.setattr(speed, "ENGINES", {"torch RPC": TorchRPC})
    found = written("bench", name, "--smoke")["rows"]
    values = {row["name"]: row["value"] for row in found}
    assert len(values) == len(found) > 1
    for row in found:
        ends = row["least"], row["value"], row["most"]
        assert list(ends) == sorted(ends)
        assert row["ratio"] == pytest.approx(row["value"] / values[row["baseline"]])


def test_a_conversation_has_another_seed_each_turn():
    def run(config, engine, **_):
        scores.append((config.seed, engine))
        score = SimpleNamespace(env_steps=20, seconds=4.0, solved=config.seed == 3)
        return SimpleNamespace(score=score)

    scores, system = [], SimpleNamespace(run=run)
    figures = partial(speed.figures, system, ReinforceConfig(), "an engine")
    assert figures(3) == {"environment steps": 5.0, "time to solve": 4.0}
    assert figures(4) == {"environment steps": 5.0}
    assert scores == [(3, "an engine"), (4, "an engine")]


def test_a_step_is_that_of_the_slowest_trainer_once_all_are_warm():
    slow, fast = (
        SimpleNamespace(step_seconds=[100.0] * speed.WARM_UP + [each, 50.0, each])
        for each in (0.5, 0.25)
    )
    for result in ([fast, slow], SimpleNamespace(trainers=[slow, fast]), slow):
        system = SimpleNamespace(run=lambda *_, result=result, **__: result)
        assert speed.figures(system, None, "an engine", 1) == {"step": 0.5}
