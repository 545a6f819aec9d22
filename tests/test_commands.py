"""The commands: flags, what they write and print, files, and exit codes."""

import dataclasses
import json
import math
import resource
import subprocess
import sys
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
from clumsy import DIVERGED, ends
from running import COMMAND

from cdopt_tutorial import cli, parameter_server
from cdopt_tutorial.commands import COMMANDS, train
from cdopt_tutorial.commands.train import SYSTEMS
from cdopt_tutorial.run import WorkerError


def system_of(name):
    """The folder of a command's system, and the class of its settings."""
    system = import_module(f"cdopt_tutorial.{SYSTEMS[name].folder}")
    return system, getattr(system, SYSTEMS[name].config)


def test_without_a_command_all_are_listed(capsys):
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said and COMMANDS[name] in said for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_each_flag(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    said = capsys.readouterr().out
    assert not caught.value.code and f"cdopt-tutorial {name}" in said
    kinds = (system_of(name)[1], SYSTEMS[name].flags) if name in SYSTEMS else ()
    for field in sum(map(dataclasses.fields, kinds), ()):
        _, _, flag = said.partition(f"--{field.name.replace('_', '-')}")
        assert len(flag.partition("(default")[0].split()) > 3


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
    "rnn --manifold stiefel --per-gate": {"manifold": "stiefel", "per_gate": True},
    "hybrid --shares 2 1": {"shares": (2.0, 1.0)},
    "reinforce --smoke --max-episodes 9": {"max_episodes": 40},
    "rnn --against-local": {"dtype": "float64", "dropout": 0.0},
    "hybrid --engine ray": {"on": "ray"},
    "rnn --engine ray --address a:1": {"on": "ray:a:1"},
}  # fmt: skip


@pytest.mark.parametrize("line", CHANGES)
def test_a_config_differs_from_the_default_as_the_flags_say(line):
    values, options = read(line)
    wanted = {"on": "rpc", "deadline": math.inf} | CHANGES[line]
    assert values | options == wanted


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
# Commands, and how the first line begins that each prints.
RUNS = {
    "reinforce --num-observers 1 --log-interval 1": "Episode",
    "rollouts": "solved",
    f"rnn {SMALL} --manifold oblique --where server --corpus TEXT": "Training epoch 1",
    "hybrid --shares 3 1": "Training epoch 1",
    "shard --strategy ddp --device cpu": "valid_perplexity",
}


@pytest.mark.parametrize("args", RUNS)
def test_a_smoke_run_equals_one_process_and_writes_what_it_prints(
    args, written, text, capsys
):
    given = args.replace("TEXT", str(text)).split()
    found = written(*given, "--smoke", "--against-local")
    assert 0 <= found["max_parameter_difference"] <= 1e-10
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == "" and lines[0].startswith(RUNS[args])
    for name, value in found.items():
        if isinstance(value, float):
            assert f"{name:26} {value:.4g}" in lines and value >= 0
    lists = [name for name, value in found.items() if isinstance(value, list)]
    assert lists and not [line for line in lines if line.split()[0] in lists]


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


def test_results_go_into_a_pipe():
    code = "from cdopt_tutorial.commands import *; write_json(Path('/dev/stdout'), {})"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"{}\n"


def test_a_task_that_was_not_solved_is_a_failure(monkeypatch, tmp_path, capsys):
    file, figures = tmp_path / "out.json", {"seconds": 2.04, "losses": [1.0]}
    ran = SimpleNamespace(figures=figures.copy, weights={})
    monkeypatch.setattr("cdopt_tutorial.reinforce.run", lambda *_, **__: ran)
    for solved, more, code in (True, [], 0), (False, [], 1), (False, ["--smoke"], 0):
        figures["solved"] = solved
        assert cli.main(["reinforce", *more, "--json", str(file)]) == code
        written = json.loads(file.read_text())
        assert written == figures | {"max_parameter_difference": None}
        said = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert said == [["seconds", "2.04"], ["solved", str(solved)]]


# A weight that is not finite could not even be projected; the other one's losses are
# finite, but its perplexity overflows.
@pytest.mark.parametrize(
    "args",
    [
        "rnn --manifold stiefel --penalty-param 1e308 --hidden 8 --embedding 8",
        "shard --num-ranks 1 --device cpu --manifold none --lr 100",
    ],
)
def test_a_training_that_diverges_is_a_failure(args, tmp_path, capsys):
    ends(f"{args} --smoke --json {tmp_path}/out.json", DIVERGED, 1, capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_failed_is_named(monkeypatch, tmp_path, capsys):
    def run(*_, **__):
        raise WorkerError("ps", "raised KeyError", "its traceback")

    monkeypatch.setattr("cdopt_tutorial.hybrid.run", run)
    file = tmp_path / "out.json"
    file.write_text("earlier")
    assert cli.main(["hybrid", "--json", str(file)]) == 1
    said = capsys.readouterr().err
    assert said == "cdopt-tutorial: ps raised KeyError\n\nits traceback\n"
    assert file.read_text() == "earlier"
