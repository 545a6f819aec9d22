"""The commands' interface: flags, files, exit codes; no training runs."""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from clumsy import DIVERGED
from hosts import PATIENCE

from cdopt_tutorial import cli
from cdopt_tutorial.commands import build, common, execute
from cdopt_tutorial.run import WorkerError


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    import_module(f"cdopt_tutorial.commands.{command}").add(parser)
    return parser


class TestFlags:
    @pytest.mark.parametrize("command", cli.COMMANDS)
    def test_are_explained(self, command, capsys):
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert not caught.value.code
        for action in parser_of(command)._actions:
            assert action.choices or action.help.strip("default: 0123456789.()")
        assert f"cdopt-tutorial {command}" in capsys.readouterr().out

    def test_of_other_commands_are_not_imported(self):
        code = (
            "import sys; from cdopt_tutorial.cli import main\n"
            "try: main(['--help'])\n"
            "except SystemExit: sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert done.returncode == 0 and b"reinforce" in done.stdout


@dataclasses.dataclass
class Started(Exception):
    """The run that a command has started, before anything of it happens."""

    job: object
    on: str
    options: dict


RUNS = {
    "reinforce": "cdopt_tutorial.commands.reinforce.reinforce.run",
    "rollouts": "cdopt_tutorial.commands.rollouts.rollouts.run",
    "rnn": "cdopt_tutorial.commands.rnn.rnn.run",
    "hybrid": "cdopt_tutorial.commands.hybrid.hybrid.run",
    "shard": "cdopt_tutorial.commands.shard.sharding.run",
}


@pytest.fixture
def started(monkeypatch, text):
    """Gives the run that a command starts."""

    def start(job, on, **options):
        raise Started(job, on, options)

    def started(command, *args):
        monkeypatch.setattr(RUNS[command], start)
        corpus = ["--corpus", str(text)] if command == "rnn" else []
        with pytest.raises(Started) as caught:
            cli.main([command, *corpus, *args])
        return caught.value

    return started


def config_of(started: Started):
    return getattr(started.job, "config", started.job)


def changed(config) -> dict:
    """The fields of a config that differ from the default."""
    plain, own = dataclasses.asdict(type(config)()), dataclasses.asdict(config)
    return {name: value for name, value in own.items() if value != plain[name]}


STIEFEL = {"manifold": "stiefel", "per_gate": True, "penalty_param": 0.5}
# Flags are made from the fields of a config: here is one of each kind.
CHANGES = {
    "rnn --cut logits --hidden 6 --lr 0.5 --no-sync":
        {"cut": "logits", "hidden": 6, "lr": 0.5, "sync": False},
    "rnn --clip 3 --max-steps 9": {"clip": 3.0, "max_steps": 9},
    "rnn --manifold stiefel --per-gate --penalty 0.5": STIEFEL,
    "hybrid --shares 2 1": {"shares": (2.0, 1.0)},
    "reinforce --smoke": {"max_episodes": 40},
    "rollouts --smoke": {"max_episodes": 128},
    "rnn --smoke": {"max_steps": 30},
    "rnn --against-local": {"dtype": "float64", "dropout": 0.0},
    "hybrid --smoke": {"max_steps": 30},
    "hybrid --against-local": {"dtype": "float64"},
    "shard --smoke": {"max_steps": 10, "width": 16, "seq_len": 8},
}  # fmt: skip


class TestConfig:
    @pytest.mark.parametrize("args", CHANGES)
    def test_differs_from_the_default_as_the_flags_say(self, args, started):
        command, *given = args.split()
        found = started(command, *given)
        assert changed(config_of(found)) == CHANGES[args]
        assert found.options["deadline"] == math.inf

    def test_has_the_device(self, started, monkeypatch):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        for command in RUNS:
            config = config_of(started(command, "--device", "cuda:1"))
            assert config.device == "cuda:1"

    @pytest.mark.usefixtures("engines_installed")
    def test_has_the_engine(self, started):
        for command in RUNS:
            assert started(command).on == "rpc"
            there = "--engine", "ray", "--address", "a:1"
            assert started(command, *there).on == "ray:a:1"
        assert started("hybrid", "--engine", "ray").on == "ray"

    def test_of_an_rnn_comes_with_its_files(self, started, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        loaded = []
        monkeypatch.setattr(
            "cdopt_tutorial.parameter_server.checkpoint.load", loaded.append
        )
        files = "--checkpoint", "kept", "--resume", "earlier", "--max-restarts", "2"
        found = started("rnn", *files)
        assert found.options["max_restarts"] == 2
        assert found.job.keep == tmp_path / "kept"
        assert [path.name for path in loaded] == ["earlier"]

    def test_of_the_grammar_has_the_seed(self, started):
        one, again, other = (
            started("rnn", "--corpus", "grammar", "--seed", seed).job.corpus.train
            for seed in "223"
        )
        assert len(one) == 100_000
        assert one.equal(again) and not one.equal(other)


class TestJson:
    def test_that_can_not_be_written_leaves_nothing(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(OSError):
            common.write_json(tmp_path / "out.json", {"a": 1})
        monkeypatch.setattr(Path, "write_bytes", full)  # to touch it costs no room
        with pytest.raises(common.UsageError, match="No space left on device"):
            common.writable(str(tmp_path / "out.json"))
        assert list(tmp_path.iterdir()) == []

    def test_replaces_the_file_to_which_a_link_leads(self, tmp_path):
        link, file, same = (tmp_path / name for name in ("link", "out.json", "same"))
        link.symlink_to(file)
        for number in (1, 2):  # nothing is there yet, and then a file
            assert common.writable(str(link)) == link
            assert file.exists() == (number == 2)  # tried without being written
            common.write_json(link, {"a": number})
            assert json.loads(file.read_text()) == {"a": number} and link.is_symlink()
            if number == 1:
                same.hardlink_to(file)
        assert json.loads(same.read_text()) == {"a": 1}  # nobody reads half of the new

    def test_goes_into_a_pipe_which_is_tried_without_ending_it(self, tmp_path):
        pipe, read = tmp_path / "pipe", []
        os.mkfifo(pipe)
        assert common.writable(str(pipe)) == pipe  # with no reader yet
        thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
        thread.start()
        common.write_json(pipe, {"a": 1})
        thread.join(PATIENCE)
        assert json.loads(*read) == {"a": 1} and not pipe.is_file()


@pytest.mark.parametrize(
    ("solved", "args", "code"),
    [(True, [], 0), (False, [], 1), (False, ["--smoke"], 0)],
)
def test_reinforce_has_failed_unless_it_solved_or_was_a_smoke_run(
    solved, args, code, monkeypatch, tmp_path, capsys
):
    score = SimpleNamespace(
        solved=solved, running_reward=1.0, rewards=[1.0] * 7, env_steps=7, seconds=2.0
    )
    found = SimpleNamespace(score=score, as_json=lambda: {"of": "the training"})
    monkeypatch.setattr(RUNS["reinforce"], lambda *_, **__: found)
    file = tmp_path / "out.json"
    assert cli.main(["reinforce", "--json", str(file), *args]) == code
    assert json.loads(file.read_text()) == {"of": "the training"}
    said = capsys.readouterr().out
    assert ("Solved!" in said) == solved
    assert ("Not solved after 7 episodes." in said) != solved
    assert "7 environment steps in 2.0 s: 4 a second" in said


@pytest.mark.parametrize(
    ("train_loss", "valid_loss"), [(math.nan, None), (math.inf, None), (1.0, math.inf)]
)
def test_a_hybrid_that_diverges_writes_nothing(
    train_loss, valid_loss, monkeypatch, tmp_path, capsys
):
    def run(_, on, on_report, **__):
        valid = valid_loss and SimpleNamespace(loss=valid_loss, accuracy=0.5)
        note = SimpleNamespace(epoch=1, train_loss=train_loss, valid=valid)
        on_report("trainer0", note)

    monkeypatch.setattr(RUNS["hybrid"], run)
    assert cli.main(["hybrid", "--json", str(tmp_path / "out.json")]) == 1
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", f"cdopt-tutorial: {DIVERGED}\n")


class TestExitCode:
    def test_of_a_failed_worker(self, monkeypatch, tmp_path, capsys):
        def run(*_, **__):
            raise WorkerError("ps", "raised KeyError", "its traceback")

        monkeypatch.setattr(RUNS["hybrid"], run)
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
