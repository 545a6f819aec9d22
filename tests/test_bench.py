"""What the benches have in common, and what each makes of a run; no time is held."""

import json
import math
from types import SimpleNamespace

import pytest

from cdopt_tutorial.bench import (
    copying,
    engines,
    holding,
    hybrid,
    rates,
    reinforce,
    rnn,
    rows,
)
from cdopt_tutorial.cli import main
from cdopt_tutorial.dissolving import memory
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.hybrid import HybridConfig
from cdopt_tutorial.sharding import study
from cdopt_tutorial.sharding.study import KINDS


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


# Those of `constraints` and `shards` are in tests of their own.
@pytest.mark.usefixtures("engines_installed")
@pytest.mark.parametrize(
    "name", ["reinforce", "rnn", "hybrid", "copying", "holding", "engines", "rollouts"]
)
def test_a_smoke_run_has_rows_with_ratios(name, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "ENGINES", {engines.BASELINE: TorchRPC})
    monkeypatch.setattr(holding, "KINDS", ["free"])
    monkeypatch.setattr(copying, "MODELS", ["free", "LSTM"])
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


def test_the_best_rate_has_the_lowest_mean_loss_and_none_that_is_not_finite():
    found = {("free", 0.1): (1, 5), ("free", 0.2): (2, 3), ("free", 0.3): (0, math.nan)}
    found |= {("RNN", 0.2): (8, 8), ("RNN", 0.4): (2, 2)}
    trials = [
        rates.Trial(*of, seed, loss, 2.0)
        for of, losses in found.items()
        for seed, loss in enumerate(losses)
    ]
    lines = []
    jobs = [(trial,) for trial in trials]
    options = {"steps": 1_000, "progress": lines.append, "prefix": "task, "}
    runs, best, measured = rates.try_rates(lambda trial: trial, jobs, tuple, **options)
    assert list(map(repr, runs)) == list(map(repr, trials))
    assert best == {"free": 0.2, "RNN": 0.4}
    assert lines[0] == "task, free, lr 0.1, seed 0: loss 1.0000"
    row = {row.name: row for row in measured}
    assert row["task, free, lr 0.1: loss"].ratio == pytest.approx(3 / 2.5)
    assert row["task, free, lr 0.3: loss"].value == math.inf
    assert row["task, RNN, lr 0.2: loss"].baseline == "task, RNN, lr 0.4: loss"
    assert row["task, RNN: step"].value == 2.0  # ms
    assert row["task, RNN: step"].baseline == "task, free: step"


def test_rates_are_tuned_on_seeds_of_their_own():
    assert not set(copying.SEEDS) & set(memory.MemoryConfig().seeds)
    for chosen in memory.LEARNING_RATES, memory.NEXT_WORD_LEARNING_RATES:
        assert set(chosen) == set(memory.MODELS)
        assert set(chosen.values()) <= set(copying.LRS)
    assert not set(holding.SEEDS) & set(study.SEEDS)
    assert set(study.LEARNING_RATES) == set(KINDS)
    assert set(study.LEARNING_RATES.values()) <= set(holding.LRS)
