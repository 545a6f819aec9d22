"""What the benches have in common, and what each makes of a run; nothing is timed."""

import math
import time
from types import SimpleNamespace

import pytest
import torch

from cdopt_tutorial.bench import bare, hybrid, launch, reinforce, rnn, rows
from cdopt_tutorial.engines.trace import Span


class TestRows:
    VALUES = {
        "a": {"x": [5.0, 1.0, 2.0], "own": [6.0], "unnamed": [1.0]},
        "b": {"x": [4.0, 4.0, 9.0]},
        "c": {"own": [3.0]},
    }

    def test_are_medians_over_the_baselines(self):
        found = rows.rows(self.VALUES, {"x": "s", "own": "B"}, baseline="b")
        assert found == [
            rows.Row("a: x", 2.0, "s", "b: x", 0.5),
            rows.Row("a: own", 6.0, "B", "a: own", 1.0),
            rows.Row("b: x", 4.0, "s", "b: x", 1.0),
            rows.Row("c: own", 3.0, "B", "a: own", 0.5),
        ]

    def test_are_of_variants_that_take_turns(self):
        order, lines = [], []
        variants = {
            name: lambda turn, name=name: order.append((name, turn)) or {"x": turn}
            for name in "ab"
        }
        found, more = rows.compare(variants, [1, 2, 9], lines.append, {"x": "s"}, "b")
        assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 9), ("b", 9)]
        assert lines == [f"{name}, turn {turn}" for name, turn in order]
        assert more == {"values": {"a": {"x": [1, 2, 9]}, "b": {"x": [1, 2, 9]}}}
        assert found == rows.rows(more["values"], {"x": "s"}, "b")

    def test_are_written_with_the_machine_and_shown_in_columns(self):
        found = rows.rows(self.VALUES, {"x": "s"}, baseline="b")
        written = rows.report(found, values=self.VALUES)
        assert written["rows"][0] == {
            "name": "a: x", "value": 2.0, "unit": "s", "baseline": "b: x", "ratio": 0.5,
        }  # fmt: skip
        assert written["values"] == self.VALUES
        assert written["machine"]["torch"] == torch.__version__
        assert set(written["machine"]) == {"cores", "python", "torch", "system"}
        lines = rows.table(found).splitlines()
        assert lines[0].split() == ["a:", "x", "2", "s", "0.5", "x", "b:", "x"]
        assert len(lines) == 2 and len(set(map(len, lines))) == 1

    def test_hold_one_variant_against_another_too(self):
        row, more = rows.Row("c: own", 3.0, "B", "c: own", 1.0), {"values": self.VALUES}
        found, same = rows.against(([row], more), "a", "b", {"x": "s"})
        assert found == [row, rows.Row("a, over b: x", 2.0, "s", "b: x", 0.5)]
        assert same == more

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


def steps(*seconds, warm_up):
    """The seconds of steps of which some do not count, nor does one that is slow."""
    return [100.0] * warm_up + [*seconds, 50.0, min(seconds)]


class TestRnn:
    @pytest.fixture
    def jobs(self, monkeypatch):
        """What is run, by way; all runs are made up."""
        jobs = {"local": [], "plain": [], "traced": [], "bare": [], "words": []}

        def history(job):
            jobs["words"].append(len(job.corpus.vocabulary))
            return SimpleNamespace(step_seconds=steps(0.5, warm_up=rnn.WARM_UP))

        def run(job, trace=None):
            jobs["plain" if trace is None else "traced"].append(job.config)
            if trace is not None:
                trace.spans.append(Span("trainer0", "forward", 0, 10**9))
            other = SimpleNamespace(step_seconds=[9.0] * 9)
            return [history(job), other][: job.config.num_trainers]

        def run_locally(job):
            jobs["local"].append(job.config)
            return history(job)

        monkeypatch.setattr(rnn, "run", run)
        monkeypatch.setattr(rnn, "run_locally", run_locally)
        monkeypatch.setattr(rnn, "measured_bytes", lambda _: 7.0)
        monkeypatch.setattr(rnn, "expected_bytes", lambda _, vocab_size: vocab_size)
        monkeypatch.setattr(
            rnn.bare, "step_seconds", lambda *args: jobs["bare"].append(args) or 0.25
        )
        return jobs

    @pytest.fixture
    def figures(self, jobs):
        """What a smoke run measures; and the jobs by way."""
        _, more = rnn.measure(lambda _: None, smoke=True)
        return more["values"], jobs

    @pytest.mark.parametrize("smoke", [False, True])
    def test_a_smoke_run_alone_is_of_a_small_model(self, smoke, jobs):
        rnn.measure(lambda _: None, smoke)
        turns, words, width, steps = (1, 500, 32, 10) if smoke else (5, 10_000, 200, 14)
        assert len(jobs["local"]) == len(jobs["bare"]) == turns
        assert set(jobs["words"]) == {words}
        for config in jobs["local"] + jobs["plain"]:
            assert (config.embedding, config.hidden) == (width, width)
            assert config.max_steps == steps

    def test_figures_are_of_steps_that_count(self, figures):
        values, _ = figures
        tokens = rnn.CONFIG.seq_len * rnn.CONFIG.batch_size
        speed = {"step": [0.5], "tokens": [tokens / 0.5]}
        assert values.pop("local") == speed
        assert values.pop("bare") == {"step": [0.25], "tokens": [tokens / 0.25]}
        wire = {"bytes": [7.0], "bytes by arithmetic": [rnn.SMOKE_VOCAB_SIZE]}
        assert list(values) == ["logits", "loss", "loss, 2 trainers", "loss, as bare"]
        for found in values.values():
            assert found == speed | wire | {"forward": [1.0]}

    def test_variants_differ_in_what_their_names_say(self, figures):
        _, jobs = figures
        (local,) = jobs["local"]
        assert jobs["traced"] == jobs["plain"]
        logits, loss, two, plain = jobs["plain"]
        assert (logits.cut, loss.cut, two.cut) == ("logits", "loss", "loss")
        assert [each.num_trainers for each in (logits, loss, two)] == [1, 1, 2]
        assert local == loss
        assert (plain.num_layers, plain.dropout, plain.clip) == (1, 0.0, None)
        ((program, function, warm_up),) = jobs["bare"]
        assert function == "DistributedOptimizer.step"
        sizes = rnn.SMOKE_VOCAB_SIZE, loss.hidden, loss.seq_len, loss.batch_size
        assert f"BATCH_SIZE = {sizes}" in program and warm_up == rnn.WARM_UP

    def test_the_text_lasts_for_all_steps(self):
        corpus = rnn.random_corpus(50, rnn.CONFIG)
        read = rnn.CONFIG.max_steps * rnn.CONFIG.seq_len * rnn.CONFIG.batch_size
        assert len(corpus.train) == read + 1
        assert 0 <= corpus.train.min() and corpus.train.max() == 49
        assert len(corpus.vocabulary) == 50


class TestHybrid:
    @pytest.fixture
    def made_up(self, monkeypatch):
        """Runs that take no time; the fixture is a list of what was run."""
        ran = []

        def result(job):
            slow, fast = (
                SimpleNamespace(step_seconds=steps(each, warm_up=hybrid.WARM_UP))
                for each in (0.5, 0.25)
            )
            return SimpleNamespace(config=job.config, trainers=[fast, slow])

        def run(job, trace=None):
            ran.append("plain" if trace is None else "traced")
            if trace is not None:
                trace.spans.append(Span("trainer0", "lookup", 0, 10**9))
            return result(job)

        def run_locally(job):
            ran.append(f"local on {torch.get_num_threads()}")
            return result(job)

        monkeypatch.setattr(hybrid, "run", run)
        monkeypatch.setattr(hybrid, "run_locally", run_locally)
        monkeypatch.setattr(hybrid, "measured_bytes", lambda _: 7.0)
        monkeypatch.setattr(hybrid, "expected_bytes", lambda *_: 6.0)
        monkeypatch.setattr(hybrid.bare, "step_seconds", lambda *_: 0.125)
        return ran

    def test_a_step_is_that_of_the_slowest_trainer(self, made_up):
        torch.set_num_threads(2)
        _, more = hybrid.measure(lambda _: None, smoke=True)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        speed = {"step": [0.5], "samples": [64 / 0.5]}
        local, *others, plain = more["values"].values()
        assert plain == {"step": [0.125], "samples": [64 / 0.125]}
        assert local == speed and len(others) == 2
        wire = {"bytes": [7.0], "bytes by arithmetic": [6.0], "lookup": [1.0]}
        assert others[0] == others[1] == speed | wire
        assert made_up == ["local on 1"] + ["traced", "plain"] * 2

    def test_bytes_are_counted_in_the_first_turn_only(self, made_up):
        _, more = hybrid.measure(lambda _: None)
        assert list(more["values"]) == [*hybrid.variants(), "bare"]
        for name, found in more["values"].items():
            assert len(found["step"]) == hybrid.TURNS
            sends = name not in (hybrid.BASELINE, "bare")
            assert len(found.get("bytes", [])) == sends

    @pytest.mark.parametrize("smoke", [False, True])
    def test_all_take_as_many_steps_and_few_in_a_smoke_run(
        self, smoke, made_up, monkeypatch
    ):
        configs = [job.config for job in hybrid.variants(smoke).values()]
        monkeypatch.setattr(hybrid, "_program", configs.append)
        hybrid.measure(lambda _: None, smoke)
        steps = {config.max_steps for config in configs}
        assert steps == {hybrid.SMOKE_STEPS if smoke else hybrid.STEPS}
        assert hybrid.WARM_UP < hybrid.SMOKE_STEPS < hybrid.STEPS


class TestReinforce:
    @pytest.fixture
    def configs(self, monkeypatch):
        """Runs that take no time; the fixture is a list of what was run."""
        configs = []

        def run(config, trace=None, wire=None, **_):
            configs.append((config, trace is not None))
            if trace is not None:
                trace.calls += [SimpleNamespace()] * 5
                wire.received = {"agent": 150, "observer0": 50}
            score = SimpleNamespace(
                env_steps=20, seconds=4.0, rewards=[1.0] * 3, solved=True
            )
            return SimpleNamespace(score=score)

        monkeypatch.setattr(reinforce, "run", run)
        times = [[10.0, 10.5, 12.0]]
        monkeypatch.setattr(reinforce.bare, "call_times", lambda *_: times)
        return configs

    def test_figures_are_those_of_a_run_and_of_a_traced_one(self, configs):
        assert reinforce.figures("packed", seed=3, max_episodes=50) == {
            "environment steps": 5.0, "time to solve": 4.0, "episodes": 3,
            "solved": 1.0, "calls": 0.25, "bytes": 10.0,
        }  # fmt: skip
        (timed, plain), (short, traced) = configs
        assert (plain, traced) == (False, True)
        assert (timed.max_episodes, short.max_episodes) == (50, 32)
        for config in (timed, short):
            assert (config.conversation, config.seed) == ("packed", 3)
            assert config.num_observers == 2

    @pytest.mark.parametrize("smoke", [False, True])
    def test_all_conversations_are_trained_from_all_seeds(self, smoke, configs):
        _, more = reinforce.measure(lambda _: None, smoke)
        assert set(more["values"]["bare"]["environment steps"]) == {2 / 2.0}
        timed = [config for config, traced in configs if not traced]
        seeds = [1] if smoke else [1, 2, 3, 4, 5]
        assert [(each.seed, each.conversation) for each in timed] == [
            (seed, name) for seed in seeds for name in reinforce.CONVERSATIONS
        ]
        assert {each.max_episodes for each in timed} == {4 if smoke else 10_000}


@pytest.mark.parametrize("smoke", [False, True])
def test_each_way_to_start_is_in_a_parent_of_its_own(smoke, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command[-1])
        return SimpleNamespace(stdout=f"a warning\n{len(asked)}.5\n")

    monkeypatch.setattr(launch.subprocess, "run", run)
    found, more = launch.measure(lambda _: None, smoke)
    turns = 1 if smoke else 5
    assert len(asked) == 3 * turns
    assert more["values"][launch.BASELINE]["start to end"] == [
        1.5 + 3 * turn for turn in range(turns)
    ]
    number = 2 if smoke else 4
    spawn, start = (f"print(time_{way}({number}))" for way in ("spawn", "launch"))
    codes = [code.partition("; ")[2] for code in asked]
    assert codes == [spawn, start, f"{start}; {start}"] * turns
    assert all(math.isfinite(row.ratio) for row in found)


def test_a_launch_is_of_so_many_workers(monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "launch", launched.append)
    begin = time.perf_counter()
    assert 0 < launch.time_launch(3) < time.perf_counter() - begin
    assert [list(roles) for roles in launched] == [["worker0", "worker1", "worker2"]]
