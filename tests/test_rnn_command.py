"""The command `cdopt-tutorial rnn`: good runs, a full disk, and workers that die."""

import json
import math
import resource
import signal
import subprocess
from functools import partial

import pytest
from running import COMMAND

from cdopt_tutorial.cli import main
from cdopt_tutorial.parameter_server import traffic

SMALL = ["--embedding", "8", "--hidden", "8", "--seq-len", "5", "--batch-size", "4"]


@pytest.fixture
def text(tmp_path):
    """A corpus of 1,200 tokens."""
    file = tmp_path / "text"
    file.write_text("the cat sat on the mat , and the dog saw it .\n" * 100)
    return file


@pytest.fixture
def rnn(tmp_path, text):
    """Run the command on the small text; returns what it wrote."""

    def run(*args, code=0):
        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        base = ["rnn", "--corpus", str(text), *SMALL, "--json", str(file)]
        assert main([*base, *args]) == code
        return json.loads(file.read_text()) if code == 0 else None

    return run


@pytest.fixture
def no_count(monkeypatch):
    """Bytes are not counted, which would take two more runs."""
    monkeypatch.setattr(traffic, "measured_bytes", lambda job: math.nan)


class TestRun:
    def test_a_smoke_run_writes_what_it_found(self, rnn, capsys):
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
        printed = capsys.readouterr()
        assert printed.err == ""
        assert f"perplexity {results['valid_perplexity']:.1f}" in printed.out

    def test_that_is_resumed_goes_on_as_if_it_had_not_ended(
        self, rnn, tmp_path, no_count
    ):
        file, how = str(tmp_path / "checkpoint"), ("--cut", "logits", "--no-sync")
        first = rnn("--max-steps", "8", "--checkpoint", file, *how)
        resumed = rnn("--max-steps", "12", "--resume", file, *how)
        assert resumed["losses"][0][:8] == first["losses"][0]
        assert resumed["steps"] == 12 and first["bytes_per_step"] is None
        again = rnn("--max-steps", "8", "--resume", file, *how)
        for name in ("losses", "train_loss", "valid_perplexity", "steps"):
            assert again[name] == first[name]
        assert again["tokens_per_second"] == 0

    def test_that_diverges_is_a_failure_in_one_line(self, rnn, capsys):
        # A weight that is not finite could not even be projected.
        rnn("--smoke", "--penalty", "1e308", "--manifold", "stiefel", code=1)
        error = capsys.readouterr().err
        assert "diverged" in error
        assert error.count("\n") == 1


def test_a_checkpoint_that_finds_no_room_is_told_in_one_line(text, tmp_path):
    kept = tmp_path / "checkpoint"
    wide = ["--embedding", "512", "--hidden", "512", "--max-steps", "1"]
    arguments = ["rnn", "--corpus", text, *SMALL, *wide, "--checkpoint", kept]
    most = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2**22, 2**22))
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=most)
    assert done.returncode == 1
    told = f"cdopt-tutorial: trainer0 can't write {kept}: File too large\n"
    assert done.stderr == told
    assert list(tmp_path.iterdir()) == [text]  # not half of one


@pytest.mark.xdist_group("rnn_command")
class TestDeath:
    @pytest.fixture
    def running(self, runs, text, tmp_path):
        """A run with two trainers under way."""
        endless = ["--num-trainers", "2", "--epochs", "100000"]
        files = ["--corpus", str(text), "--checkpoint", str(tmp_path / "checkpoint")]
        runs.begin(["rnn", *SMALL, *endless, *files], sign="Training")
        return runs

    @pytest.mark.parametrize("name", ["ps", "trainer1"])
    def test_of_any_worker_is_named_and_ends_the_run(self, running, name):
        assert f"{name} was killed by SIGKILL" in running.kill_worker(name)

    # Last, since the process that the others share ends with it.
    def test_of_the_command_takes_the_workers_with_it(self, running):
        assert "Traceback" not in running.send_signal(signal.SIGINT, 130)
