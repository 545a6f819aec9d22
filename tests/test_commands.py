"""The commands' interface: flags, files, exit codes; no training runs."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest
from clumsy import DIVERGED, ends
from hosts import PATIENCE

from cdopt_tutorial import cli
from cdopt_tutorial.commands import build, common, execute, training
from cdopt_tutorial.run import WorkerError
from cdopt_tutorial.training import Progress, Score

NAMES = "reinforce", "rnn", "hybrid", "shard", "rollouts"
SYSTEMS = {name: import_module(f"cdopt_tutorial.commands.{name}") for name in NAMES}


class TestHelp:
    @pytest.mark.parametrize("name", cli.COMMANDS)
    def test_explains_each_flag(self, name, capsys):
        with pytest.raises(SystemExit) as caught:
            cli.main([name, "--help"])
        said = capsys.readouterr().out
        assert not caught.value.code and f"cdopt-tutorial {name}" in said
        if name in SYSTEMS:
            kinds = SYSTEMS[name].Config, SYSTEMS[name].Flags
            for field in sum(map(dataclasses.fields, kinds), ()):
                _, _, flag = said.partition(f"--{field.name.replace('_', '-')}")
                assert len(flag.partition("(default")[0].split()) > 3

    def test_of_the_whole_imports_no_command(self):
        code = "from cdopt_tutorial.cli import main; main(['--help'])\n"
        code += "import sys; sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert done.returncode == 0 and b"reinforce" in done.stdout


class Started(Exception):
    """The run that a command has started, before anything of it happens."""


@pytest.fixture
def started(monkeypatch, text):
    """Gives the job, the flags and the options of a run that a command starts."""

    def start(job, flags, **options):
        raise Started(job, flags, options)

    def started(name, *args):
        monkeypatch.setattr(SYSTEMS[name], "train", start)
        corpus = ["--corpus", str(text)] if name == "rnn" else []
        with pytest.raises(Started) as caught:
            cli.main([name, *corpus, *args])
        return caught.value.args

    return started


def changed(job) -> dict:
    """The fields of a job's config that differ from the default."""
    config = getattr(job, "config", job)
    plain = dataclasses.asdict(type(config)())
    values = dataclasses.asdict(config).items()
    return {name: value for name, value in values if value != plain[name]}


# Flags are made from the fields of a config: here is one of each kind.
CHANGES = {
    "rnn --cut logits --hidden 6 --lr 0.5 --no-sync":
        {"cut": "logits", "hidden": 6, "lr": 0.5, "sync": False},
    "rnn --clip 3 --max-steps 9": {"clip": 3.0, "max_steps": 9},
    "rnn --manifold stiefel --per-gate --penalty 0.5":
        {"manifold": "stiefel", "per_gate": True, "penalty_param": 0.5},
    "hybrid --shares 2 1": {"shares": (2.0, 1.0)},
    "reinforce --smoke --max-episodes 9": {"max_episodes": 40},
    "rollouts --smoke": {"max_episodes": 128},
    "rnn --against-local": {"dtype": "float64", "dropout": 0.0},
    "hybrid --against-local": {"dtype": "float64"},
    "shard --smoke": {"max_steps": 10, "width": 16, "seq_len": 8},
}  # fmt: skip


@pytest.mark.usefixtures("engines_installed")
class TestRun:
    @pytest.mark.parametrize("args", CHANGES)
    def test_differs_from_the_default_as_the_flags_say(self, args, started):
        job, _, options = started(*args.split())
        assert changed(job) == CHANGES[args]
        assert options == {"on": "rpc", "deadline": math.inf}

    @pytest.mark.parametrize("name", NAMES)
    def test_has_its_engine_and_device(self, name, started, monkeypatch):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        ray = "--engine", "ray"
        job, _, options = started(name, *ray, "--address", "a:1", "--device", "cuda:1")
        assert changed(job)["device"] == "cuda:1" and options["on"] == "ray:a:1"
        assert started(name, *ray)[2]["on"] == "ray"

    def test_of_an_rnn_has_its_text_and_files(self, started, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        loaded = []
        checkpoint = "cdopt_tutorial.parameter_server.checkpoint"
        monkeypatch.setattr(f"{checkpoint}.load", loaded.append)
        files = "--checkpoint", "kept", "--resume", "earlier", "--max-restarts", "2"
        job, flags, _ = started("rnn", *files)
        assert flags.max_restarts == 2 and job.keep == tmp_path / "kept"
        assert [path.name for path in loaded] == ["earlier"]
        one, again, other = (
            started("rnn", "--corpus", "grammar", "--seed", seed)[0].corpus.train
            for seed in "223"
        )
        assert len(one) == 100_000 and one.equal(again) and not one.equal(other)


class TestJson:
    def test_that_can_not_be_written_leaves_nothing(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(OSError):
            common.write_json(tmp_path / "out.json", {"a": 1})
        monkeypatch.setattr(Path, "write_bytes", full)  # to touch it costs no room
        with pytest.raises(common.UsageError, match="No space left on device"):
            common.writable(tmp_path / "out.json")
        assert list(tmp_path.iterdir()) == []

    def test_replaces_the_file_to_which_a_link_leads(self, tmp_path):
        link, file, same = (tmp_path / name for name in ("link", "out.json", "same"))
        link.symlink_to(file)
        for number in (1, 2):  # nothing is there yet, and then a file
            common.writable(link)
            assert file.exists() == (number == 2)  # tried without being written
            common.write_json(link, {"a": number})
            assert json.loads(file.read_text()) == {"a": number} and link.is_symlink()
            if number == 1:
                same.hardlink_to(file)
        assert json.loads(same.read_text()) == {"a": 1}  # nobody reads half of the new

    def test_goes_into_a_pipe_which_is_tried_without_ending_it(self, tmp_path):
        pipe, read = tmp_path / "pipe", []
        os.mkfifo(pipe)
        common.writable(pipe)  # with no reader yet
        thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
        thread.start()
        common.write_json(pipe, {"a": 1})
        thread.join(PATIENCE)
        assert json.loads(*read) == {"a": 1} and not pipe.is_file()


class TestExitCode:
    @pytest.mark.parametrize(
        ("solved", "smoke", "code"),
        [(True, [], 0), (False, [], 1), (False, ["--smoke"], 0)],
    )
    def test_of_a_task_that_was_to_be_solved(
        self, solved, smoke, code, monkeypatch, tmp_path, capsys
    ):
        figures = {"solved": solved, "seconds": 2.04, "losses": [1.0]}
        monkeypatch.setattr(SYSTEMS["reinforce"], "train", lambda *_, **__: figures)
        file = tmp_path / "out.json"
        assert cli.main(["reinforce", "--json", str(file), *smoke]) == code
        assert json.loads(file.read_text()) == figures
        said = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert said == [["solved", str(solved)], ["seconds", "2.04"]]

    @pytest.mark.parametrize(
        ("train_loss", "valid"),
        [(math.nan, None), (math.inf, None), (1.0, Score(math.inf, 0.5))],
    )
    def test_of_a_training_that_diverges(
        self, train_loss, valid, monkeypatch, tmp_path, capsys
    ):
        def train(*_, **__):
            training.log("trainer0", Progress(1, 1, train_loss, valid))

        monkeypatch.setattr(SYSTEMS["hybrid"], "train", train)
        ends(f"hybrid --json {tmp_path}/out.json", DIVERGED, 1, capsys)
        assert list(tmp_path.iterdir()) == []

    def test_of_a_failed_worker(self, monkeypatch, tmp_path, capsys):
        def train(*_, **__):
            raise WorkerError("ps", "raised KeyError", "its traceback")

        monkeypatch.setattr(SYSTEMS["hybrid"], "train", train)
        file = tmp_path / "out.json"
        file.write_text("earlier")
        assert cli.main(["hybrid", "--json", str(file)]) == 1
        said = capsys.readouterr().err
        assert said == "cdopt-tutorial: ps raised KeyError\n\nits traceback\n"
        assert file.read_text() == "earlier"

    def test_of_a_build_that_is_not_clean(self, monkeypatch, capsys):
        def render(*_, **__):
            raise build.render.RenderError("a bad page")

        monkeypatch.setattr(execute, "run", lambda args: 0)
        monkeypatch.setattr(build.render, "render", render)
        assert cli.main(["build"]) == 1
        assert capsys.readouterr() == ("", "\na bad page\n")
