"""The commands' runs: what they write and print, and runs that diverge."""

import math
import resource
import subprocess
from functools import partial

import pytest
from clumsy import DIVERGED
from running import COMMAND

from cdopt_tutorial.commands import shard
from cdopt_tutorial.parameter_server import traffic
from cdopt_tutorial.sharding import MAX_VOCAB, ShardConfig, transformer

SMALL = "--embedding 8 --hidden 8 --seq-len 5 --batch-size 4".split()


@pytest.fixture
def rnn(written, text):
    """Runs `rnn` on the small text; returns what it wrote."""
    return partial(written, "rnn", "--corpus", text, *SMALL)


@pytest.fixture
def printed(capsys):
    """Gives the lines that a command has printed; none of them is an error."""

    def printed():
        said = capsys.readouterr()
        assert said.err == ""
        return said.out.splitlines()

    return printed


def test_reinforce_writes_what_it_found(written, tmp_path, printed):
    args = "--conversation packed --num-observers 1 --log-interval 5 --seed 4"
    results = written("reinforce", "--smoke", *args.split())
    assert results["episodes"] == len(results["rewards"]) == 40
    assert results["env_steps"] == sum(results["rewards"])
    assert results["solved"] is False and results["seconds"] > 0
    assert 0 < results["running_reward"] < 500
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]
    log = [line for line in printed() if line.startswith("Episode")]
    names = [line.split("\t")[0] for line in log]
    assert names == [f"Episode {5 * i}" for i in range(1, 9)]
    assert f"Average reward: {results['running_reward']:.2f}" in log[-1]


class TestRnn:
    def test_writes_what_it_found(self, rnn, printed):
        results = rnn("--smoke", "--against-local")
        assert 0 <= results["max_parameter_difference"] <= 1e-10
        (losses,), (staleness,) = results["losses"], results["staleness"]
        assert results["steps"] == len(losses) == len(staleness) == 30
        assert results["train_loss"] == pytest.approx(sum(losses[-10:]) / 10)
        assert 1 < results["valid_perplexity"] < 30
        assert 1 < results["baseline_perplexity"] < results["unigram_perplexity"]
        tokens = results["tokens_per_second"] * results["seconds"]
        assert tokens == pytest.approx(30 * 5 * 4)
        assert results["bytes_per_step"] > results["expected_bytes_per_step"] > 0
        shown = f"valid_perplexity {results['valid_perplexity']:.4g}"
        assert shown in [" ".join(line.split()) for line in printed()]

    def test_of_a_manifold_writes_feasibility_for_each_step(self, rnn, monkeypatch):
        # Counting bytes would take two more runs.
        monkeypatch.setattr(traffic, "measured_bytes", lambda job: math.nan)
        how = "--manifold oblique --where server --penalty 0.5 --against-local --smoke"
        found = rnn(*how.split())
        assert found["max_parameter_difference"] <= 1e-10
        assert len(found["feasibility"]["weight"]) == 30
        assert 0 < found["feasibility"]["mapped"][-1] < 1e-2
        assert found["projected_feasibility"] < 1e-6
        assert 1 < found["projected_perplexity"] < 30

    def test_that_is_resumed_goes_on_as_if_it_had_not_ended(
        self, rnn, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(traffic, "measured_bytes", lambda job: math.nan)
        file, how = str(tmp_path / "checkpoint"), ("--cut", "logits", "--no-sync")
        first = rnn("--max-steps", "8", "--checkpoint", file, *how)
        resumed = rnn("--max-steps", "12", "--resume", file, *how)
        assert resumed["losses"][0][:8] == first["losses"][0]
        assert resumed["steps"] == 12 and first["bytes_per_step"] is None
        again = rnn("--max-steps", "8", "--resume", file, *how)
        for name in ("losses", "train_loss", "valid_perplexity", "steps"):
            assert again[name] == first[name]
        assert again["tokens_per_second"] == 0

    def test_whose_checkpoint_finds_no_room_says_so_in_one_line(self, text, tmp_path):
        kept = tmp_path / "checkpoint"
        wide = ["--embedding", "512", "--hidden", "512", "--max-steps", "1"]
        arguments = ["rnn", "--corpus", text, *SMALL, *wide, "--checkpoint", kept]
        most = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2**22, 2**22))
        command = [*COMMAND, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=most)
        assert done.returncode == 1
        line = f"cdopt-tutorial: trainer0 can't write {kept}: File too large\n"
        assert done.stderr == line
        assert list(tmp_path.iterdir()) == [text]  # and no half of a checkpoint


def test_hybrid_writes_what_it_found(written, printed):
    args = "--against-local --shares 3 1 --max-steps 30 --manifold stiefel"
    results = written("hybrid", *args.split())
    assert 0 <= results["max_parameter_difference"] <= 1e-10
    assert results["num_trainers"] == 2 and results["semantics"] == "exact"
    assert results["steps"] == len(results["losses"]) == 30
    assert results["loss"] == results["losses"][-1] < results["losses"][0]
    assert results["losses"][0] == pytest.approx(math.log(10), rel=0.1)
    assert 0.5 < results["test_accuracy"] < 1  # of ten classes
    assert 0 < results["feasibility"] < 0.1
    assert results["replica_difference"] == 0 < results["samples_per_second"]
    first, second, *_ = printed()
    for number, line in enumerate((first, second), 1):
        assert line.startswith(f"Training epoch {number}\tloss ")
        assert "\tvalidation accuracy 0." in line


class TestShard:
    def test_writes_what_it_found(self, written, printed):
        args = "--smoke --against-local --strategy ddp --device cpu"
        found = written("shard", *args.split())
        assert len(found["losses"]) == shard.SMOKE["max_steps"]
        assert found["losses"][0] == pytest.approx(math.log(MAX_VOCAB), rel=0.1)
        assert found["losses"][-1] < found["losses"][0]
        assert 1 < found["valid_perplexity"] < MAX_VOCAB  # which is that of guessing
        assert found["seconds_per_step"] > 0
        config = ShardConfig(dtype="float64", device="cpu", **shard.SMOKE)
        model = transformer(config, MAX_VOCAB)
        size = sum(each.nbytes for each in model.parameters())
        assert 2 * size <= found["bytes_per_step"] < 2.5 * size
        assert found["peak_memory_bytes"] > 4 * size
        assert 0 < found["feasibility"]["mapped"] < found["feasibility"]["weight"] < 1
        assert 0 <= found["max_parameter_difference"] <= 1e-10
        assert printed()[-2].endswith("gloo: no GPU is used")

    def test_of_free_stages_has_no_feasibility_and_no_difference(
        self, written, monkeypatch
    ):
        for name in "measured_bytes", "measured_memory":
            monkeypatch.setattr(shard.costs, name, lambda _: 1)
        args = "--smoke --strategy pipeline --manifold none --device cpu"
        found = written("shard", *args.split())
        assert found["feasibility"] is found["max_parameter_difference"] is None
        assert all(map(math.isfinite, found["losses"]))


# A weight that is not finite could not even be projected; the last one's losses are
# finite, but its perplexity overflows.
@pytest.mark.parametrize(
    "args",
    [
        "rnn --manifold stiefel --penalty 1e308 --hidden 8 --embedding 8",
        "shard --num-ranks 1 --device cpu --manifold stiefel --lr 1e6",
        "shard --num-ranks 1 --device cpu --manifold none --lr 100",
    ],
)
def test_that_diverges_is_a_failure_in_one_line(args, written, capsys):
    assert not written(*args.split(), "--smoke", code=1)
    assert capsys.readouterr().err == f"cdopt-tutorial: {DIVERGED}\n"
