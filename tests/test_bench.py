"""What the benches have in common, and what each makes of a run; nothing is timed."""

from types import SimpleNamespace

from cdopt_tutorial.bench import bare, hybrid, reinforce, rnn, rows
from cdopt_tutorial.engines.probes.trace import Span
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

    def test_hold_one_variant_against_another_too(self):
        units = {"x": "s", "own": "B"}
        found = rows.rows(self.VALUES, units, baseline="b")
        more, same = rows.against((found, self.VALUES), "c", "a", "own")
        assert same == self.VALUES and more[:-1] == found
        last = rows.Row("c, over a: own", 3.0, "B", "a: own", 0.5, 3.0, 3.0)
        assert more[-1] == last

    def test_phases_are_of_one_worker_and_in_seconds(self):
        spans = [
            Span(worker, name, begin, begin + 10**8 * length)
            for worker, name, begin, length in [
                ("trainer0", "forward", 0, 1), ("trainer0", "backward", 5, 2),
                ("trainer0", "forward", 7, 3), ("trainer0", "forward", 9, 7),
                ("trainer1", "forward", 0, 9), ("trainer1", "else", 0, 9),
            ]
        ]  # fmt: skip
        found = rows.phases(lambda job, trace: trace.spans.extend(job), spans)
        assert found == {"forward": 0.3, "backward": 0.2}


def test_a_step_of_a_program_is_that_of_its_slowest_worker(monkeypatch):
    called = [[1.0, 9.0, 11.0, 14.0, 64.0], [2.0, 3.0, 4.0, 5.5, 6.5]]
    monkeypatch.setattr(bare, "call_times", lambda *asked: asked and called)
    assert bare.step_seconds("program", "step", warm_up=1) == 3.0
    assert bare.step_seconds("program", "step", warm_up=0) == 5.5


class TestRnn:
    def test_the_text_lasts_for_all_steps(self):
        corpus = rnn.random_corpus(50, rnn.CONFIG)
        read = rnn.CONFIG.max_steps * rnn.CONFIG.seq_len * rnn.CONFIG.batch_size
        assert len(corpus.train) == read + 1
        assert 0 <= corpus.train.min() and corpus.train.max() == 49
        assert len(corpus.vocabulary) == 50

    def test_figures_are_of_steps_that_count(self):
        history = SimpleNamespace(step_seconds=[100.0] * rnn.WARM_UP + [0.5, 50.0, 0.5])
        tokens = rnn.CONFIG.seq_len * rnn.CONFIG.batch_size
        expected = {"step": 0.5, "tokens": tokens / 0.5}
        assert rnn._speed(rnn.CONFIG, history) == expected


def test_a_step_of_the_hybrid_is_that_of_its_slowest_trainer():
    slow, fast = (
        SimpleNamespace(step_seconds=[100.0] * hybrid.WARM_UP + [each, 50.0, each])
        for each in (0.5, 0.25)
    )
    result = SimpleNamespace(config=HybridConfig(), trainers=[fast, slow])
    assert hybrid._speed(result) == {"step": 0.5, "samples": 64 / 0.5}


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
