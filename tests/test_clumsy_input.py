"""Clumsy input is refused in one line, before anything starts, and leaves nothing."""

import importlib
import sys
import threading
import types

import pytest
import torch
from clumsy import ends, pattern

from cdopt_tutorial import cli
from cdopt_tutorial.run import Role, launch, on_ray, serve

# A command and its flags: the line, in which ... stands for anything. TMP is an empty
# folder, TEXT a short corpus. Every check of a config is here once.
CASES = f"""
reinforce --num-observers 0: num_observers is 0, but must be 1 to 256
reinforce --max-episodes {2**64}: max_episodes is {2**64}, but must be below 2**63
reinforce --num-envs 10001: num_envs is 10001, but must be 1 to 10000
reinforce --gamma 1.2: gamma is 1.2, but must be above 0 and at most 1
reinforce --gamma nan: gamma is nan, but must be above 0 and at most 1
reinforce --conversation shouting: conversation is 'shouting', but ... or packed or ...
reinforce --seed -1: seed is -1, but must be at least 0 and below 2**64
reinforce --lr nan: lr is nan, but must be above 0 and at most 1e+37
rollouts --max-lag -1: max_lag is -1, but must be 0 to 1000
rollouts --num-rollouts 3: num_rollouts is 3, but must be ... at most num_observers
rollouts --waits long: waits is 'long', but must be fixed or heavy
rnn --seed {2**31}: seed is {2**31}, but must be at least 0 and below 2**31
rnn --cut diagonal: cut is 'diagonal', but must be logits or loss
rnn --where moon: where is 'moon', but must be trainer or server
rnn --max-steps 0: max_steps is 0, but must be at least 1
rnn --dropout 1: dropout is 1.0, but must be 0 to below 1
rnn --lr-decay 1.5: lr_decay is 1.5, but must be above 0 and at most 1
rnn --clip 0: clip is 0.0, but must be above 0
rnn --penalty 0: penalty_param is 0.0, but must be above 0 and finite
rnn --hidden 8193: hidden is 8193, but must be 1 to 8192
rnn --num-layers 65: num_layers is 65, but must be 1 to 64
rnn --num-trainers 3 --batch-size 2: num_trainers is 3, but ... at most batch_size, 2
rnn --per-gate: per_gate is True, but must be False unless the manifold is stiefel ...
rnn --batch-size 5000 --corpus TEXT: batch_size is 5000, but must be below 1170, ...
rnn --seq-len 9999 --corpus grammar: seq_len is 9999, but must be at most 4999, ...
rnn --no-sync --against-local: asynchronous trainers have no equal in one process
rnn --max-restarts 1: max-restarts is 1, which needs a checkpoint
rnn --corpus TMP: corpus '...': it cannot be read (Is a directory)
rnn --resume TMP/none: checkpoint '...': No such file or directory
rnn --resume /dev/zero: checkpoint '...': it is a directory, or a device
rnn --checkpoint TEXT: checkpoint '...': ...; to keep another there, remove it
rnn --checkpoint TMP: can't write ...: Is a directory
rnn --checkpoint /dev/null: can't write /dev/null: it is not a regular file
rnn --checkpoint TMP/a --json TMP/../empty/a: --checkpoint and --json are both '...'
rnn --json TMP/none/out.json: can't write ...: No such file or directory
execute --json TMP/{"a" * 255}: can't write ...: File name too long
hybrid --num-trainers 257: num_trainers is 257, but must be 1 to 256
hybrid --embedding 8193: embedding is 8193, but must be 1 to 8192
hybrid --semantics hope: semantics is 'hope', but must be exact or original
hybrid --manifold sphere: manifold is 'sphere', but must be none or stiefel or oblique
hybrid --manifold stiefel --where server: manifold is 'stiefel', but ... on the server
hybrid --manifold oblique --where server --by cdopt: by is 'cdopt', but ... dissolve ...
hybrid --optimizer hope: optimizer is 'hope', but must be sgd or adam
hybrid --momentum 1: momentum is 1.0, but must be 0 to below 1
hybrid --penalty=inf: penalty_param is inf, but must be above 0 and finite
hybrid --shares 1: shares is (1.0,), but must be one above 0 for each of 2 trainers, ...
hybrid --shares 1 nan: shares is (...nan), but must be one above 0 ...
hybrid --shares 999999 1: the smallest of 2 shares comes to none of 1258 bags, but ...
hybrid --semantics original --against-local: semantics original has no equal in one ...
hybrid --lr much: 'much' is not of the type float
hybrid --shares 1 two: 'two' is not of the type float
shard --num-ranks 257: num_ranks is 257, but must be 1 to 256
shard --width 8193: width is 8193, but must be 1 to 8192
shard --num-layers 65: num_layers is 65, but must be 1 to 64
shard --strategy hope: strategy is 'hope', but must be ddp or fsdp or tp or 2d or ...
shard --seq-len 50000: seq_len is 50000, but must be at most ... of 16 columns
shard --optimizer landing --manifold oblique: optimizer is 'landing', but ... oblique
shard --interface eth0: interface is 'eth0', but only a run under torchrun ...
reinforce --address a:1: address is of a cluster of Ray, so it needs engine ray
reinforce --address a --engine ray: address is 'a', but must be host:port, or ...
reinforce --engine hope: engine is 'hope', but must be rpc or ray
execute --cell-timeout 0: cell_timeout is 0, but must be at least 1
execute --loud: unrecognized arguments: --loud (see cdopt-tutorial execute --help)
dance: 'dance' is no command (see cdopt-tutorial --help)
"""
CASES = dict(case.split(": ", 1) for case in CASES.strip().splitlines())
# The refusal of a device, by the number of GPUs; None for a torch without CUDA.
DEVICES = {
    None: "device is 'cuda:9', but this torch is a build without CUDA",
    0: "device is 'cuda:9', but torch sees no GPU",
    1: "device is 'cuda:9', but the only GPU is cuda:0",
    3: "device is 'cuda:9', but the GPUs are cuda:0 to cuda:2",
}
RAY = "the engine ray needs Ray, which is not here: pip install 'cdopt-tutorial[ray]'"
NEED_A_FILE = (
    "a: role is defined in module made_up, where a worker process can't import it: put "
    "it into a file or a cell of the notebook, and launch again"
)
NO_ROLE = "a: its role can't be sent to a worker: TypeError: cannot pickle ..."
UNGUARDED = (
    "a: module my_system launches while it is imported, and its workers would do so, "
    'too: launch under `if __name__ == "__main__":`'
)
FILES = "... workers need ... open files each, but ... are allowed here: ulimit -n ..."

pytestmark = pytest.mark.usefixtures("no_process_starts")


@pytest.mark.usefixtures("scratch", "engines_installed")
@pytest.mark.parametrize("args", CASES)
def test_is_refused_in_one_line(args, text, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    said = CASES[args]
    ends(args.replace("TMP", str(empty)).replace("TEXT", str(text)), said, 2, capsys)
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--loud", "Unrecognized options: --loud"),
        ("--hidden", "Missing value for argument '--hidden'"),
    ],
)
def test_a_flag_that_is_unknown_or_lacks_its_value(flag, line, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["rnn", flag])
    said = capsys.readouterr()
    assert caught.value.code == 2 and said.out == ""
    assert line in said.err and "cdopt-tutorial rnn --help" in said.err


@pytest.mark.parametrize("count", DEVICES)
def test_a_device_that_is_not_there(count, monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: count is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(count))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count or 0)
    ends("hybrid --device cuda:9", DEVICES[count], 2, capsys)


def test_an_engine_that_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    ends("hybrid --engine ray", RAY, 2, capsys)


def test_a_file_of_someone_else(as_another, tmp_path, capsys):
    with as_another(tmp_path):
        line = "can't write ...: Permission denied"
        ends(f"rnn --json {tmp_path}/out.json", line, 2, capsys)


class TestLaunch:
    """Roles that are refused in one line, too, before anything starts."""

    def refused(self, role, line):
        with pytest.raises(ValueError) as caught:
            launch({"a": Role(role)})
        assert pattern(line).fullmatch(str(caught.value)), str(caught.value)

    def test_of_a_module_without_a_file(self, monkeypatch):
        module = types.ModuleType("made_up")
        exec("def role(): pass", vars(module))
        monkeypatch.setitem(sys.modules, "made_up", module)
        self.refused(module.role, NEED_A_FILE)
        self.refused(lambda: module, NEED_A_FILE.replace("role", "made_up"))

    def test_that_holds_a_lock(self):
        lock = threading.Lock()
        self.refused(lambda: lock, NO_ROLE)

    @pytest.mark.parametrize(("polling", "fits"), [(False, 48), (True, 224)])
    def test_that_may_not_open_the_files_of_two(self, polling, fits, monkeypatch):
        few = FILES.replace("...", "{}").format(2, fits, fits - 1, fits)
        start = "a process was about to start"
        for limit, line in (fits - 1, few), (fits, start):
            monkeypatch.setattr("resource.getrlimit", lambda _, n=limit: (n, n))
            with pytest.raises((OSError, AssertionError)) as caught:
                launch({"a": Role(serve), "b": Role(serve)}, polling=polling)
            assert str(caught.value) == line

    @pytest.mark.parametrize("file", ["my_system.py", "my_system/__init__.py"])
    def test_of_a_module_that_launches_as_it_is_imported(
        self, file, monkeypatch, tmp_path
    ):
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "my_system").mkdir()
        define, run = "def role(): pass\n", "launch({'a': Role(role)})\n"
        if file == "my_system/__init__.py":  # with its role in a submodule
            (tmp_path / "my_system/roles.py").write_text(define)
            define = "from my_system.roles import role\n"
        use = "from cdopt_tutorial.run import Role, launch\n"
        (tmp_path / file).write_text(use + define + run)
        with pytest.raises(ValueError) as caught:
            importlib.import_module("my_system")
        sys.modules.pop("my_system.roles", None)
        assert str(caught.value) == UNGUARDED
