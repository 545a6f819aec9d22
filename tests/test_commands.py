"""The commands: flags, what they write and print, files, and exit codes."""

import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
import threading
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
from clumsy import DIVERGED, ends
from hosts import PATIENCE
from running import COMMAND

from cdopt_tutorial import cli, parameter_server
from cdopt_tutorial.commands import COMMANDS, train, write_json
from cdopt_tutorial.commands.train import SYSTEMS
from cdopt_tutorial.run import WorkerError


def system_of(name):
    """The folder of a command's system, and the class of its settings."""
    system = import_module(f"cdopt_tutorial.{SYSTEMS[name].folder}")
    return system, getattr(system, SYSTEMS[name].config)


class TestHelp:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_explains_each_flag(self, name, capsys):
        with pytest.raises(SystemExit) as caught:
            cli.main([name, "--help"])
        said = capsys.readouterr().out
        assert not caught.value.code and f"cdopt-tutorial {name}" in said
        kinds = (system_of(name)[1], SYSTEMS[name].flags) if name in SYSTEMS else ()
        for field in sum(map(dataclasses.fields, kinds), ()):
            _, _, flag = said.partition(f"--{field.name.replace('_', '-')}")
            assert len(flag.partition("(default")[0].split()) > 3

    def test_of_the_whole_imports_no_command(self):
        code = "from cdopt_tutorial.cli import main; main(['--help'])\n"
        code += "import sys; sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert done.returncode == 0 and b"reinforce" in done.stdout

    def test_of_a_system_imports_no_other(self):
        code = "import sys\nfrom cdopt_tutorial import cli\n"
        code += "try: cli.main(['rnn', '--help'])\n"
        code += "finally: print(*sys.modules)"
        said = subprocess.check_output([sys.executable, "-c", code], text=True).split()
        folders = {row.folder for row in SYSTEMS.values()}
        loaded = {name.removeprefix("cdopt_tutorial.") for name in said}
        assert folders & loaded == {"parameter_server"}


def read(line):
    """What differs from the default in the config of a command, and its options."""
    name, *arguments = line.split()
    system, kind = system_of(name)
    config, _, options = train.read(name, system, arguments)
    default = dataclasses.asdict(kind())
    values = dataclasses.asdict(config).items()
    return {key: value for key, value in values if value != default[key]}, options


# Flags are made from the fields of a config: here is one of each kind.
CHANGES = {
    "rnn --cut logits --hidden 6 --lr 0.5 --no-sync":
        {"cut": "logits", "hidden": 6, "lr": 0.5, "sync": False},
    "rnn --clip 3 --max-steps 9": {"clip": 3.0, "max_steps": 9},
    "rnn --manifold stiefel --per-gate --penalty-param 0.5":
        {"manifold": "stiefel", "per_gate": True, "penalty_param": 0.5},
    "hybrid --shares 2 1": {"shares": (2.0, 1.0)},
    "hybrid --num-trainers 256": {"num_trainers": 256},
    "reinforce --smoke --max-episodes 9": {"max_episodes": 40},
    "rnn --against-local": {"dtype": "float64", "dropout": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("line", CHANGES)
def test_a_config_differs_from_the_default_as_the_flags_say(line):
    assert read(line) == (CHANGES[line], {"on": "rpc", "deadline": math.inf})


def test_a_run_has_its_engine():
    assert read("hybrid --engine ray")[1]["on"] == "ray"
    assert read("rnn --engine ray --address a:1")[1]["on"] == "ray:a:1"


def test_a_run_of_an_rnn_has_its_text_and_files(tmp_path, monkeypatch):
    loaded, started = [], []

    def run(job, **options):
        started.append(job)
        assert options["max_restarts"] == 2
        raise WorkerError("ps", "was not started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parameter_server.checkpoint, "load", loaded.append)
    monkeypatch.setattr(parameter_server, "run", run)
    files = "--checkpoint kept --resume earlier --max-restarts 2 --corpus grammar"
    for seed in "223":
        assert cli.main(["rnn", *files.split(), "--seed", seed]) == 1
    assert {job.keep for job in started} == {tmp_path / "kept"}
    assert {path.name for path in loaded} == {"earlier"}
    one, again, other = (job.corpus.train for job in started)
    assert len(one) == 100_000 and one.equal(again) and not one.equal(other)


SMALL = "--embedding 8 --hidden 8 --seq-len 5 --batch-size 4"
# Commands, and the keys of what they write, which other programs may rely on.
KEYS = {
    "reinforce --conversation packed --num-observers 1 --log-interval 5":
        "solved episodes mean_reward rewards env_steps rounds seconds "
        "max_parameter_difference",
    "rollouts --against-local":
        "solved episodes mean_reward rewards env_steps rounds seconds "
        "lag max_ratio schedule max_parameter_difference",
    f"rnn {SMALL} --manifold oblique --where server --against-local --corpus TEXT":
        "train_loss valid_perplexity baseline_perplexity unigram_perplexity "
        "tokens_per_second bytes_per_step expected_bytes_per_step seconds steps losses "
        "staleness feasibility projected_perplexity projected_feasibility "
        "max_parameter_difference",
    "hybrid --shares 3 1 --against-local":
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
    if "--against-local" in args:
        assert found["max_parameter_difference"] <= 1e-10
    else:
        assert found["max_parameter_difference"] is None
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = [line.split() for line in printed.out.splitlines()]
    for name, value in found.items():
        if isinstance(value, float):
            assert [name, f"{value:.4g}"] in lines and value >= 0
    if "reinforce" in args:
        assert lines[0][:3] == ["Episode", "5", "Last"]
        assert found["episodes"] == len(found["rewards"]) == 40
        assert found["env_steps"] == sum(found["rewards"])
    if "rnn" in args or "hybrid" in args:
        assert lines[0][:3] == ["Training", "epoch", "1"]
    if "rnn" in args:
        assert found["steps"] == len(found["feasibility"]["weight"]) == 30
        tokens = found["tokens_per_second"] * found["seconds"]
        assert tokens == pytest.approx(30 * 5 * 4)
        assert found["bytes_per_step"] > found["expected_bytes_per_step"] > 0
    if "hybrid" in args:  # without constraints
        assert found["feasibility"] is found["projected_accuracy"] is None


def test_a_run_that_is_resumed_at_its_end_takes_no_time(
    written, text, tmp_path, monkeypatch
):
    traffic = parameter_server.traffic
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
    line = f"cdopt-tutorial: trainer0 can't write {kept}: File too large\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert list(tmp_path.iterdir()) == [text]  # and no half of a checkpoint


class TestJson:
    def test_replaces_the_file_to_which_a_link_leads(self, tmp_path):
        link, file, same = (tmp_path / name for name in ("link", "out.json", "same"))
        link.symlink_to(file)
        write_json(link, {"a": 1})  # nothing is there yet
        same.hardlink_to(file)
        write_json(link, {"a": 2})
        assert json.loads(file.read_text()) == {"a": 2} and link.is_symlink()
        assert json.loads(same.read_text()) == {"a": 1}  # nobody reads half of the new

    def test_goes_into_a_pipe(self, tmp_path):
        pipe, read = tmp_path / "pipe", []
        os.mkfifo(pipe)
        thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
        thread.start()
        write_json(pipe, {"a": 1})
        thread.join(PATIENCE)
        assert json.loads(*read) == {"a": 1} and not pipe.is_file()


class TestExitCode:
    def test_of_a_task_that_was_to_be_solved(self, monkeypatch, tmp_path, capsys):
        file, figures = tmp_path / "out.json", {"seconds": 2.04, "losses": [1.0]}
        ran = SimpleNamespace(figures=figures.copy, weights={})
        monkeypatch.setattr("cdopt_tutorial.reinforce.run", lambda *_, **__: ran)
        cases = (True, [], 0), (False, [], 1), (False, ["--smoke"], 0)
        for solved, more, code in cases:
            figures["solved"] = solved
            assert cli.main(["reinforce", *more, "--json", str(file)]) == code
            written = json.loads(file.read_text())
            assert written == figures | {"max_parameter_difference": None}
            said = [line.split() for line in capsys.readouterr().out.splitlines()]
            assert said == [["seconds", "2.04"], ["solved", str(solved)]]

    # A weight that is not finite could not even be projected; the other one's losses
    # are finite, but its perplexity overflows.
    @pytest.mark.parametrize(
        "args",
        [
            "rnn --manifold stiefel --penalty-param 1e308 --hidden 8 --embedding 8",
            "shard --num-ranks 1 --device cpu --manifold none --lr 100",
        ],
    )
    def test_of_a_training_that_diverges(self, args, tmp_path, capsys):
        ends(f"{args} --smoke --json {tmp_path}/out.json", DIVERGED, 1, capsys)
        assert list(tmp_path.iterdir()) == []

    def test_of_a_failed_worker(self, monkeypatch, tmp_path, capsys):
        def run(*_, **__):
            raise WorkerError("ps", "raised KeyError", "its traceback")

        monkeypatch.setattr("cdopt_tutorial.hybrid.run", run)
        file = tmp_path / "out.json"
        file.write_text("earlier")
        assert cli.main(["hybrid", "--json", str(file)]) == 1
        said = capsys.readouterr().err
        assert said == "cdopt-tutorial: ps raised KeyError\n\nits traceback\n"
        assert file.read_text() == "earlier"
