"""The commands' runs: what they write and print, and runs that fail."""

import math
import resource
import subprocess
from functools import partial

import pytest
from clumsy import DIVERGED
from running import COMMAND

from cdopt_tutorial.parameter_server import traffic

SMALL = "--embedding 8 --hidden 8 --seq-len 5 --batch-size 4"
# Commands, and the keys of what they write, which other programs may rely on.
KEYS = {
    "reinforce --conversation packed --num-observers 1 --log-interval 5":
        "solved episodes mean_reward rewards running_reward env_steps rounds seconds",
    "rollouts --replay": "solved episodes mean_reward rewards running_reward env_steps "
        "rounds seconds lag max_ratio schedule max_parameter_difference",
    f"rnn {SMALL} --manifold oblique --where server --against-local --corpus TEXT":
        "train_loss valid_perplexity baseline_perplexity unigram_perplexity "
        "tokens_per_second bytes_per_step expected_bytes_per_step seconds steps losses "
        "staleness feasibility projected_perplexity projected_feasibility "
        "max_parameter_difference",
    "hybrid --shares 3 1 --manifold stiefel --against-local":
        "num_trainers semantics manifold where by transport steps valid_accuracy "
        "test_accuracy test_loss loss losses feasibility feasibility_of_weight "
        "projected_feasibility projected_accuracy replica_difference "
        "samples_per_second max_parameter_difference",
    "shard --strategy ddp --device cpu --against-local":
        "losses valid_perplexity seconds_per_step bytes_per_step peak_memory_bytes "
        "transport feasibility max_parameter_difference",
}  # fmt: skip


@pytest.mark.parametrize("args", KEYS)
def test_a_smoke_run_writes_and_prints_what_it_found(args, written, text, capsys):
    found = written(*args.replace("TEXT", str(text)).split(), "--smoke")
    assert found.keys() == set(KEYS[args].split())
    assert 0 <= found.get("max_parameter_difference", 0) <= 1e-10
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = [line.split() for line in printed.out.splitlines()]
    for name, value in found.items():
        if isinstance(value, float):
            assert [name, f"{value:.4g}"] in lines
            assert value >= 0
    if "reinforce" in args:
        assert lines[0][:3] == ["Episode", "5", "Last"]
        assert found["episodes"] == len(found["rewards"]) == 40
        assert found["env_steps"] == sum(found["rewards"])
    if "rnn" in args:
        assert found["steps"] == len(found["feasibility"]["weight"]) == 30
        tokens = found["tokens_per_second"] * found["seconds"]
        assert tokens == pytest.approx(30 * 5 * 4)
        assert found["bytes_per_step"] > found["expected_bytes_per_step"] > 0


def test_what_there_is_not_is_null(written, monkeypatch):
    for name in "measured_bytes", "measured_memory":
        monkeypatch.setattr(f"cdopt_tutorial.sharding.costs.{name}", lambda _: 1)
    args = "shard --smoke --strategy pipeline --manifold none --device cpu"
    found = written(*args.split())
    assert found["feasibility"] is found["max_parameter_difference"] is None
    assert all(map(math.isfinite, found["losses"]))


def test_a_run_that_is_resumed_at_its_end_takes_no_time(
    written, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(traffic, "measured_bytes", lambda job: math.nan)
    args = f"rnn {SMALL} --corpus {text} --max-steps 8".split()
    first = written(*args, "--checkpoint", tmp_path / "kept")
    again = written(*args, "--resume", tmp_path / "kept")
    for name in ("losses", "train_loss", "valid_perplexity", "steps"):
        assert again[name] == first[name]
    assert again["tokens_per_second"] == 0 and first["bytes_per_step"] is None


def test_a_checkpoint_that_finds_no_room_is_said_in_one_line(text, tmp_path):
    kept = tmp_path / "checkpoint"
    wide = ["--embedding", "512", "--hidden", "512", "--max-steps", "1"]
    arguments = ["rnn", "--corpus", text, *SMALL.split(), *wide, "--checkpoint", kept]
    most = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2**22, 2**22))
    command = [*COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=most)
    assert done.returncode == 1
    line = f"cdopt-tutorial: trainer0 can't write {kept}: File too large\n"
    assert done.stderr == line
    assert list(tmp_path.iterdir()) == [text]  # and no half of a checkpoint


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
