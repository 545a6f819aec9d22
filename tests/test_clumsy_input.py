"""Clumsy input is refused in one line, before anything starts, and leaves nothing."""

import importlib
import re
import sys
import threading
import types

import pytest
import torch
from clumsy import ends, pattern, read_cases

from cdopt_tutorial.run import Role, launch, on_ray, serve

SEED = 2**64

# One setting out of its range: the command, and the line that it prints.
RANGES = f"""
reinforce num_observers is 0, but must be 1 to 256
reinforce max_episodes is {SEED}, but must be below 2**63
reinforce num_observers is 257, but must be 1 to 256
reinforce num_envs is 10001, but must be 1 to 10000
reinforce gamma is 1.2, but must be above 0 and at most 1
reinforce gamma is 0.0, but must be above 0 and at most 1
reinforce gamma is nan, but must be above 0 and at most 1
reinforce conversation is 'shouting', but must be per-step or packed or batched or ...
reinforce seed is {SEED}, but must be at least 0 and below 2**64
reinforce seed is -1, but must be at least 0 and below 2**64
reinforce lr is nan, but must be above 0 and at most 1e+37
rnn seed is {SEED}, but must be at least 0 and below 2**31
rnn cut is 'diagonal', but must be logits or loss
rnn where is 'moon', but must be trainer or server
rnn save_every is 0, but must be at least 1
rnn max_steps is 0, but must be at least 1
rnn dropout is 1.0, but must be 0 to below 1
rnn lr_decay is 1.5, but must be above 0 and at most 1
rnn clip is 0.0, but must be above 0
rnn penalty_param is 0.0, but must be above 0 and finite
rollouts max_lag is 1001, but must be 0 to 1000
rnn hidden is 8193, but must be 1 to 8192
rnn num_layers is 65, but must be 1 to 64
hybrid num_trainers is 257, but must be 1 to 256
hybrid embedding is 8193, but must be 1 to 8192
shard num_ranks is 257, but must be 1 to 256
shard width is 8193, but must be 1 to 8192
shard num_layers is 65, but must be 1 to 64
hybrid batch_size is 0, but must be at least 1
hybrid semantics is 'hope', but must be exact or original
hybrid manifold is 'sphere', but must be none or stiefel or oblique
hybrid by is 'hand', but must be dissolve or cdopt
hybrid optimizer is 'hope', but must be sgd or adam
hybrid momentum is 1.0, but must be 0 to below 1
hybrid penalty_param is inf, but must be above 0 and finite
hybrid lr is 1.1e+37, but must be above 0 and at most 1e+37
shard strategy is 'hope', but must be ddp or fsdp or tp or 2d or pipeline or ...
shard lr is 0.0, but must be above 0 and at most 1e+37
execute cell_timeout is 0, but must be at least 1
"""


def read_ranges() -> dict[str, str]:
    """The arguments that lead to these lines."""
    cases = {}
    for row in RANGES.strip().splitlines():
        command, line = row.split(" ", 1)
        name, value = re.match(r"(\w+) is '?(.+?)'?,", line).groups()
        flag = name.removesuffix("_param").replace("_", "-")
        cases[f"{command} --{flag} {value}"] = line
    return cases


# TMP is an empty folder, TEXT a short corpus.
CASES = read_ranges() | read_cases(f"""
rnn --num-trainers 3 --batch-size 2
    num_trainers is 3, but each needs a column of its own, and batch_size is 2
rnn --per-gate
    per_gate needs the manifold stiefel on the trainer, but that is none on the trainer
rnn --per-gate --manifold stiefel --where server
    per_gate needs the manifold stiefel on the trainer, but that is stiefel on the
    server
rnn --batch-size 5000 --corpus TEXT
    batch_size is 5000, but must be below 1170, the tokens of the text
shard --seq-len 50000
    seq_len is 50000, but must be at most ... in this text, of 16 columns
shard --optimizer landing --manifold oblique
    optimizer is 'landing', but must be sgd or adam or muon where the manifold is
    oblique
hybrid --num-trainers 200 --shares {"1 " * 199} 999999
    the smallest of 200 shares comes to none of 1258 bags, but each trainer needs at
    least 1
hybrid --shares 1e308 1
hybrid --shares 1
hybrid --shares 1 0
hybrid --shares 1 nan
    shares is (...), but must be one above 0 for each of 2 trainers, and all below 2**63
hybrid --manifold stiefel --where server
    manifold is 'stiefel', but must be oblique on the server
hybrid --manifold oblique --where server --by cdopt
    by is 'cdopt', but must be dissolve on the server
hybrid --semantics original --against-local
    semantics original has no equal in one process
rnn --no-sync --against-local
    asynchronous trainers have no equal in one process
shard --interface eth0
    interface is 'eth0', but only a run under torchrun can choose one
hybrid --lr much
    argument --lr: invalid float value: 'much' (see cdopt-tutorial hybrid --help)
dance
    argument ...: invalid choice: 'dance' (choose from ...) (see ... --help)
reinforce --loud
    unrecognized arguments: --loud (see cdopt-tutorial --help)
execute --json TMP
rnn --json TMP
rnn --checkpoint TMP
    can't write ...: Is a directory
rnn --json TMP/none/out.json
    can't write ...: No such file or directory
rnn --json TMP/{"a" * 255}
    can't write ...: File name too long
rnn --checkpoint /dev/null
    can't write /dev/null: it is not a regular file
rnn --corpus TMP
    corpus '...': it cannot be read (Is a directory)
rnn --checkpoint TMP/both --json TMP/../empty/both
    --checkpoint and --json are both '...'
rnn --checkpoint TEXT
    checkpoint '...': it is damaged or truncated, or no checkpoint at all; to keep
    another there, remove it
rnn --corpus grammar --seq-len 1000000000000
    seq_len is 1000000000000, but must be at most 4999, a column's tokens in this text
reinforce --address a:1
    address is of a cluster of Ray, so it needs engine ray
reinforce --address a --engine ray
    address is 'a', but must be host:port, or auto for that of this host
rnn --max-restarts 1
    max-restarts is 1, which needs a checkpoint
rnn --resume TMP/none
    checkpoint '...': No such file or directory
rnn --resume TMP
rnn --resume /dev/zero
    checkpoint '...': it is a directory, or a device
""")

# The refusal of a device, by the number of GPUs; None for a torch without CUDA.
DEVICES = {
    None: "device is 'cuda:9', but this torch is a build without CUDA",
    0: "device is 'cuda:9', but torch sees no GPU",
    1: "device is 'cuda:9', but the only GPU is cuda:0",
    3: "device is 'cuda:9', but the GPUs are cuda:0 to cuda:2",
}

RAY = "the engine ray needs Ray, which is not here: pip install 'cdopt-tutorial[ray]'"
# Commands that need an engine whose library is missing.
MISSING = {
    "rnn --engine ray": RAY,
}

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
LOCKED = "can't write ...: Permission denied"
LINES = [
    *CASES.values(), *DEVICES.values(), *MISSING.values(), NEED_A_FILE, NO_ROLE,
    UNGUARDED, FILES, LOCKED,
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("no_process_starts")


@pytest.mark.usefixtures("scratch", "engines_installed")
@pytest.mark.parametrize("args", CASES)
def test_is_refused_in_one_line(args, text, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    said = CASES[args]
    ends(args.replace("TMP", str(empty)).replace("TEXT", str(text)), said, 2, capsys)
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("count", DEVICES)
def test_a_device_that_is_not_there(count, monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: count is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(count))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count or 0)
    ends("hybrid --device cuda:9", DEVICES[count], 2, capsys)


@pytest.mark.parametrize("args", MISSING)
def test_an_engine_that_is_missing(args, monkeypatch, capsys):
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    ends(args, MISSING[args], 2, capsys)


def test_a_file_of_someone_else(as_another, tmp_path, capsys):
    with as_another(tmp_path):
        ends(f"rnn --json {tmp_path}/out.json", LOCKED, 2, capsys)


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
