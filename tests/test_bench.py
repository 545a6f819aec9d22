"""What the benches have in common, and what each makes of a run; no time is held."""

import json
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest

from cdopt_tutorial.bench import engines, holding, hybrid, launch, reinforce, rnn, rows
from cdopt_tutorial.cli import main
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.hybrid import HybridConfig


class TestRows:
    VALUES = {
        "a": {"x": [5.0, 1.0, 2.0], "own": [6.0], "unnamed": [1.0]},
        "b": {"x": [4.0, 4.0, 9.0]},
        "c": {"own": [3.0]},
    }

    def test_are_medians_over_the_baselines_with_least_and_most(self):
        assert rows.rows(self.VALUES, {"x": "s", "own": "B"}, baseline="b") == [
            rows.Row("a: x", 2.0, "s", "b: x", 0.5, 1.0, 5.0),
            rows.Row("b: x", 4.0, "s", "b: x", 1.0, 4.0, 9.0),
            rows.Row("a: own", 6.0, "B", "a: own", 1.0, 6.0, 6.0),
            rows.Row("c: own", 3.0, "B", "a: own", 0.5, 3.0, 3.0),
        ]

    def test_are_of_variants_that_take_turns(self):
        order, lines = [], []
        variants = {
            name: lambda turn, name=name: order.append((name, turn)) or {"x": turn}
            for name in "ab"
        }
        found, more = rows.sweep(variants, 2, lines.append, {"x": "s"}, "b")
        assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
        assert lines == [f"{name}, turn {turn}" for name, turn in order]
        assert more == {"values": {"a": {"x": [1, 2]}, "b": {"x": [1, 2]}}}
        assert found == rows.rows(more["values"], {"x": "s"}, "b")

    def test_are_written_with_the_machine_and_shown_in_columns(self):
        found = rows.rows(self.VALUES, {"x": "s"}, baseline="b")
        written = rows.report(found, values=self.VALUES)
        assert written["rows"][0] == {
            "name": "a: x", "value": 2.0, "unit": "s", "baseline": "b: x", "ratio": 0.5,
            "least": 1.0, "most": 5.0,
        }  # fmt: skip
        assert written["values"] == self.VALUES
        assert set(written["machine"]) == {"cores", "python", "torch", "system"}
        lines = rows.table(found).splitlines()
        assert lines[0].split() == "a: x 2 (1 to 5) s 0.5 x b: x".split()
        assert len(lines) == 2 and len(set(map(len, lines))) == 1


# Those of `constraints`, `copying` and `shards` are in tests of their own.
@pytest.mark.usefixtures("engines_installed")
@pytest.mark.parametrize("name", ["reinforce", "rnn", "hybrid", "holding", "engines"])
def test_a_smoke_run_has_rows_with_ratios(name, tmp_path, monkeypatch):
    # The others have tests of their own.
    monkeypatch.setattr(engines, "ENGINES", {engines.BASELINE: TorchRPC})
    monkeypatch.setattr(holding, "KINDS", ["free"])
    file = tmp_path / "bench.json"
    assert main(["bench", name, "--smoke", "--json", str(file)]) == 0
    written = json.loads(file.read_text())["rows"]
    values = {row["name"]: row["value"] for row in written}
    assert len(values) == len(written) > 1
    for row in written:
        ends = row["least"], row["value"], row["most"]
        assert list(ends) == sorted(ends)
        assert row["ratio"] == pytest.approx(row["value"] / values[row["baseline"]])
    if name == "reinforce":  # traffic falls from one conversation to the next
        calls, sent = (
            [values[f"{of}: {figure}"] for of in ("per-step", "packed", "local-policy")]
            for figure in ("calls", "bytes")
        )
        assert calls[0] > 1.7 * calls[1] and calls[2] < 0.05 * calls[1]
        assert sent[0] > sent[1]


def test_figures_of_a_conversation_are_those_of_a_run_and_of_a_traced_one(monkeypatch):
    configs = []

    def run(config, trace=None, wire=None, **_):
        configs.append((config.max_episodes, config.seed, trace is not None))
        if trace is not None:
            trace.calls += [SimpleNamespace()] * 5
            wire.received = {"agent": 150, "observer0": 50}
        score = SimpleNamespace(
            env_steps=20, seconds=4.0, rewards=[1.0] * 3, solved=True
        )
        return SimpleNamespace(score=score)

    monkeypatch.setattr(reinforce, "run", run)
    assert reinforce.figures("packed", seed=3, max_episodes=50) == {
        "environment steps": 5.0, "time to solve": 4.0, "episodes": 3,
        "solved": 1.0, "calls": 0.25, "bytes": 10.0,
    }  # fmt: skip
    assert configs == [(50, 3, False), (32, 3, True)]


def test_the_rnns_text_lasts_for_all_steps():
    corpus = rnn.random_corpus(50, rnn.CONFIG)
    read = rnn.CONFIG.max_steps * rnn.CONFIG.seq_len * rnn.CONFIG.batch_size
    assert len(corpus.train) == read + 1
    assert 0 <= corpus.train.min() and corpus.train.max() == 49
    assert len(corpus.vocabulary) == 50


def test_a_step_of_the_rnn_is_the_median_of_those_that_count():
    history = SimpleNamespace(step_seconds=[100.0] * rnn.WARM_UP + [0.5, 50.0, 0.5])
    tokens = rnn.CONFIG.seq_len * rnn.CONFIG.batch_size
    assert rnn._speed(rnn.CONFIG, history) == {"step": 0.5, "tokens": tokens / 0.5}


def test_a_step_of_the_hybrid_is_that_of_its_slowest_trainer():
    slow, fast = (
        SimpleNamespace(step_seconds=[100.0] * hybrid.WARM_UP + [each, 50.0, each])
        for each in (0.5, 0.25)
    )
    result = SimpleNamespace(config=HybridConfig(), trainers=[fast, slow])
    assert hybrid.step_seconds(result) == 0.5


class TestLaunch:
    def test_takes_a_while(self):
        for begin in (launch.time_spawn, launch.time_launch):
            assert 0 < begin(1) < 60

    def test_counts_the_last_call_in_a_parent(self, monkeypatch):
        spawns, launches = iter([4.0]), iter([3.0, 2.0, 1.0])

        def run(command, **_):
            with redirect_stdout(StringIO()) as said:
                exec(command[-1], {})
            return SimpleNamespace(stdout=said.getvalue())

        monkeypatch.setattr(launch, "time_spawn", lambda number: next(spawns))
        monkeypatch.setattr(launch, "time_launch", lambda number: next(launches))
        monkeypatch.setattr(launch.subprocess, "run", run)
        found, _ = launch.measure(lambda _: None, smoke=True)
        assert [(row.value, row.ratio) for row in found] == [
            (4, 1),
            (3, 0.75),
            (1, 0.25),
        ]
