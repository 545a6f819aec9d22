"""The command `cdopt-tutorial rnn`: good runs, bad input, and workers that die."""

import json
import resource
import signal
import subprocess
from functools import partial

import pytest
from running import COMMAND

from cdopt_tutorial.cli import main

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


class TestRun:
    def test_a_smoke_run_writes_what_it_found(self, rnn, capsys):
        results = rnn("--smoke", "--against-local")
        assert 0 <= results["max_parameter_difference"] <= 1e-10
        assert results["steps"] == len(results["losses"][0]) == 30
        assert len(results["losses"]) == len(results["staleness"]) == 1
        assert results["train_loss"] == pytest.approx(
            sum(results["losses"][0][-10:]) / 10
        )
        assert 1 < results["valid_perplexity"] < 30
        assert 1 < results["baseline_perplexity"] < results["unigram_perplexity"]
        assert results["tokens_per_second"] * results["seconds"] == pytest.approx(
            30 * 5 * 4
        )
        assert isinstance(results["bytes_per_step"], float)
        printed = capsys.readouterr()
        assert printed.err == ""
        assert f"perplexity {results['valid_perplexity']:.1f}" in printed.out

    def test_against_local(self, rnn):
        how = ("--cut", "logits", "--num-trainers", "2")
        results = rnn("--smoke", "--against-local", *how)
        assert 0 <= results["max_parameter_difference"] <= 1e-10

    @pytest.mark.parametrize("cut", ["loss", "logits"])
    def test_bytes_are_those_of_the_arithmetic(self, rnn, cut):
        wide = ["--embedding", "200", "--hidden", "200", "--seq-len", "20"]
        results = rnn("--max-steps", "1", "--cut", cut, *wide)
        ratio = results["bytes_per_step"] / results["expected_bytes_per_step"]
        assert 1 <= ratio <= 1.15

    def test_that_is_resumed_goes_on_as_if_it_had_not_ended(self, rnn, tmp_path):
        whole = rnn("--max-steps", "12", "--save-every", "4")
        file = tmp_path / "checkpoint"
        keep = "--checkpoint", str(file), "--save-every", "4"
        assert rnn("--max-steps", "8", *keep)["losses"][0] == whole["losses"][0][:8]
        resume = "--resume", str(file), "--save-every", "4"
        resumed = rnn("--max-steps", "12", *resume)
        for name in ("losses", "train_loss", "valid_perplexity", "steps"):
            assert resumed[name] == whole[name]
        again = rnn("--max-steps", "8", *resume)
        assert again["tokens_per_second"] == 0
        assert len(again["losses"][0]) == 8

    @pytest.mark.parametrize("more", ["--lr 1e6", "--penalty 1e308 --manifold stiefel"])
    def test_that_diverges_is_a_failure_in_one_line(self, more, rnn, capsys):
        # A weight that is not finite could not even be projected.
        rnn("--smoke", *more.split(), code=1)
        error = capsys.readouterr().err
        assert "diverged" in error
        assert error.count("\n") == 1


@pytest.mark.usefixtures("no_process_starts")
class TestBadInput:
    def refused(self, args, message, capsys):
        assert main(["rnn", *map(str, args)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert message in printed.err

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "there is no such file"),
            (b"", "it is empty"),
            (b"\x7fELF\0\1\2" * 1000, "it is binary"),
            (b"too short to learn from", "at least 1000 are needed"),
        ],
        ids=["missing", "empty", "binary", "short"],
    )
    def test_a_corpus_that_does_not_do(self, content, message, tmp_path, capsys):
        file = tmp_path / "corpus"
        if content is not None:
            file.write_bytes(content)
        self.refused(["--corpus", file], message, capsys)
        self.refused(["--corpus", file], repr(str(file)), capsys)

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--cut", "crew"], "cut is 'crew', but must be logits or loss"),
            (["--num-trainers", "two"], "invalid int value"),
            (["--no-sync", "--against-local"], "no equal in one process"),
            (["--device", "meta"], "device is 'meta', but"),
            (["--json", "/no/such/folder/out.json"], "can't write /no/such/folder"),
            (["--checkpoint", "/no/such/folder/file"], "can't write /no/such/folder"),
            (["--checkpoint", "/"], "can't write /: it is a directory"),
            (["--resume", __file__], "no checkpoint at all"),
            (["--loud"], "unrecognized arguments: --loud"),
        ],
    )
    def test_an_option_that_does_not_do(self, args, message, capsys):
        self.refused(args, message, capsys)

    def test_more_columns_than_text(self, text, capsys):
        args = ["--corpus", text, "--batch-size", "5000"]
        self.refused(args, "5000 columns need", capsys)


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


def test_a_checkpoint_of_another_text_is_refused(rnn, text, tmp_path, capsys):
    file = str(tmp_path / "checkpoint")
    rnn("--max-steps", "1", "--checkpoint", file)
    text.write_text("another text of other words\n" * 300)
    rnn("--resume", file, code=2)
    assert "the checkpoint is of another text" in capsys.readouterr().err


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
