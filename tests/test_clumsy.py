"""A clumsy call ends in one line, before anything starts, and leaves nothing.

It may have bad flags, no room, a damaged book, or a checkpoint of something else.
"""

import importlib
import io
import os
import pickle
import re
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from books import run, smallest_book, write_chapter
from clumsy import ends, pattern

from cdopt_tutorial.data import Grammar
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import Job, RNNConfig, checkpoint, run_locally
from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.run import Role, launch, on_ray, serve

# A command and its flags: the line, in which ... stands for anything. TMP is an empty
# folder, TEXT a short corpus. Every check of a config is here once.
CASES = f"""
reinforce --num-observers 0: num_observers is 0, but must be 1 to 256
reinforce --max-episodes {2**64}: max_episodes is {2**64}, but must be below 2**63
reinforce --gamma nan: gamma is nan, but must be above 0 and at most 1
reinforce --conversation shouting: conversation is 'shouting', but ... or packed or ...
reinforce --seed -1: seed is -1, but must be at least 0 and below 2**64
reinforce --lr nan: lr is nan, but must be above 0 and at most 1e+37
reinforce --lr 1e38: lr is 1e+38, but must be above 0 and at most 1e+37
rollouts --max-lag -1: max_lag is -1, but must be 0 to 1000
rollouts --waits long: waits is 'long', but must be fixed or heavy
rollouts --clip nan: clip is nan, but must be at least 0
rnn --seed {2**31}: seed is {2**31}, but must be at least 0 and below 2**31
rnn --cut diagonal: cut is 'diagonal', but must be logits or loss
rnn --where moon: where is 'moon', but must be trainer or server
rnn --max-steps 0: max_steps is 0, but must be at least 1
rnn --dropout 1: dropout is 1.0, but must be 0 to below 1
rnn --lr-decay 1.5: lr_decay is 1.5, but must be above 0 and at most 1
rnn --clip 0: clip is 0.0, but must be above 0
rnn --penalty-param 0: penalty_param is 0.0, but must be above 0 and finite
rnn --hidden 8193: hidden is 8193, but must be 1 to 8192
rnn --num-trainers 3 --batch-size 2: num_trainers is 3, but ... at most batch_size, 2
rnn --per-gate: per_gate is True, but must be False unless the manifold is stiefel ...
rnn --batch-size 5000 --corpus TEXT: batch_size is 5000, but must be below 1170, ...
rnn --seq-len 9999 --corpus grammar: seq_len is 9999, but must be at most 4999, ...
rnn --no-sync --against-local: asynchronous trainers have no equal in one process
rnn --max-restarts 1: max-restarts is 1, which needs a checkpoint
rnn --max-restarts -1: max-restarts is -1, but must be at least 0
rnn --corpus TMP: corpus '...': it cannot be read (Is a directory)
rnn --resume TMP/none: checkpoint '...': No such file or directory
rnn --checkpoint TEXT: checkpoint '...': it is damaged or truncated, or no ...
rnn --checkpoint /dev/null: checkpoint '...': it is a directory, or a device
rnn --json TMP/none/file: can't write .../none/file: is its folder there, and yours?
rnn --checkpoint TMP/none/file: can't write .../none/file: is its folder ...
rnn --json TMP/file --checkpoint TMP/file: --checkpoint and --json are both '...'
build notebooks/01_reinforce.ipynb: build takes no notebooks: execute runs ...
execute --json TMP: can't write ...: is its folder there, and yours?
hybrid --num-trainers 257: num_trainers is 257, but must be 1 to 256
hybrid --semantics hope: semantics is 'hope', but must be exact or original
hybrid --manifold sphere: manifold is 'sphere', but must be none or stiefel or oblique
hybrid --manifold stiefel --where server --num-servers 2 --embedding 1089: embedding ...
hybrid --unit cells: unit is 'cells', but must be columns or rows
hybrid --manifold oblique --where server --by cdopt: by is 'cdopt', but ... dissolve ...
hybrid --optimizer hope: optimizer is 'hope', but must be sgd or adam
hybrid --momentum 1: momentum is 1.0, but must be 0 to below 1
hybrid --shares 1 nan: shares is (...nan), but must be one above 0 ...
hybrid --shares 999999 1: the smallest of 2 shares comes to none of 1258 bags, but ...
hybrid --semantics original --against-local: semantics original has no equal in one ...
hybrid --device gpu: device is 'gpu', but must be auto, cpu, cuda or cuda:N
hybrid --lr much: Error parsing --lr: could not convert string to float: 'much' (see ...
rnn --clip None: Error parsing --clip: no type matching FLOAT could be ... ['None']. ...
rnn --loud: Unrecognized options: --loud (see cdopt-tutorial rnn --help)
rnn --hidden: Missing value for argument '--hidden'. Expected 1 values. (see ...
shard --num-ranks 257: num_ranks is 257, but must be 1 to 256
shard --strategy hope: strategy is 'hope', but must be ddp or fsdp or tp or 2d or ...
shard --strategy 2d --num-ranks 5: num_ranks is 5, but must be 4, 6, 8, ... is 2d
shard --strategy pipeline-ddp: num_ranks is 2, but must be 4, 6, ... is pipeline-ddp
shard --num-ranks 3: batch_size is 16, but must be a multiple of 3: ...
shard --strategy pipeline --batch-size 15: batch_size is 15, but ... multiple of 2: ...
shard --strategy pipeline --num-ranks 4: num_layers is 2, but must be at least 4, ...
shard --strategy tp --num-ranks 3: num_heads is 4, but must be a multiple of 3: ...
shard --width 25: width is 25, but must be a multiple of num_heads, 4
shard --clip 0: clip is 0.0, but must be above 0
shard --seq-len 50000: seq_len is 50000, but must be at most ... of 16 columns
shard --optimizer landing --manifold oblique: optimizer is 'landing', but ... oblique
reinforce --address a:1: on is 'rpc:a:1', but must be rpc, ray, ray:auto or ray:...
reinforce --address a --engine ray: on is 'ray:a', but must be rpc, ray, ray:auto ...
reinforce --engine hope: on is 'hope', but must be rpc, ray, ray:auto or ray:...
dance: 'dance' is no command (see cdopt-tutorial --help)
"""
CASES = dict(case.split(": ", 1) for case in CASES.strip().splitlines())
RAY = "the engine ray needs Ray, which is not here: pip install 'cdopt-tutorial[ray]'"


@pytest.mark.usefixtures("scratch", "engines_installed", "no_process_starts")
class TestFlags:
    @pytest.mark.parametrize("args", CASES)
    def test_is_refused_in_one_line(self, args, text, tmp_path, capsys):
        empty = tmp_path / "empty"
        empty.mkdir()
        flags = args.replace("TMP", str(empty)).replace("TEXT", str(text))
        ends(flags, CASES[args], 2, capsys)
        assert list(empty.iterdir()) == []

    def test_of_an_engine_that_is_missing(self, monkeypatch, capsys):
        monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
        ends("hybrid --engine ray", RAY, 2, capsys)


NO_FILE = "a: ... module made_up, where a worker process can't import it: put ..."
NO_ROLE = "a: its role can't be sent to a worker: TypeError: cannot pickle ..."
UNGUARDED = (
    "a: ... module my_system launches while it is imported, and its workers would do "
    'so, too: launch under `if __name__ == "__main__":`'
)
FILES = "2 workers need {} open files each, but {} are allowed here: ulimit -n {}"
# A module that launches as it is imported, with its role in a submodule.
LAUNCHING = """
from cdopt_tutorial.run import Role, launch
from my_system.roles import role
launch({"a": Role(role)})
"""


@pytest.mark.usefixtures("no_process_starts")
class TestLaunch:
    def test_of_what_can_not_be_sent(self, monkeypatch):
        module, lock = types.ModuleType("made_up"), threading.Lock()
        monkeypatch.setitem(sys.modules, "made_up", module)
        for role, line in (lambda: module, NO_FILE), (lambda: lock, NO_ROLE):
            with pytest.raises(ValueError) as caught:
                launch({"a": Role(role)})
            assert pattern(line).fullmatch(str(caught.value)), str(caught.value)

    def test_that_may_not_open_the_files_of_two(self, monkeypatch):
        for polling, fits in (False, 48), (True, 224):
            few = FILES.format(fits, fits - 1, fits)
            for limit, line in (fits - 1, few), (fits, "a process was about to start"):
                monkeypatch.setattr("resource.getrlimit", lambda _, n=limit: (n, n))
                with pytest.raises((OSError, AssertionError)) as caught:
                    launch({"a": Role(serve), "b": Role(serve)}, polling=polling)
                assert str(caught.value) == line

    def test_of_a_module_that_is_imported(self, monkeypatch, tmp_path):
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "my_system").mkdir()
        (tmp_path / "my_system/roles.py").write_text("def role(): pass\n")
        (tmp_path / "my_system/__init__.py").write_text(LAUNCHING)
        with pytest.raises(ValueError) as caught:
            importlib.import_module("my_system")
        sys.modules.pop("my_system.roles", None)
        assert pattern(UNGUARDED).fullmatch(str(caught.value))


NOTEBOOK = "...: it can't be read, or is no notebook"
BAD = "notebooks/reference.toml can't be read: ..."
# What is in the files of a book, and the line that it leads to.
DAMAGED = {
    "notebooks/01_a.ipynb": {"3": NOTEBOOK, "\xff": NOTEBOOK},
    "notebooks/reference.toml": {"[01_a.figures]\nx = 1": BAD, "\xff": BAD},
}  # fmt: skip
NO_BOOK = "the package is not in a book: install it with `make book`"
THIS = "cdopt_tutorial.publish.project.this_project"


@pytest.mark.usefixtures("scratch", "no_kernel")
class TestBook:
    @pytest.fixture
    def book(self, tmp_path, monkeypatch) -> Project:
        """The command's book, whose only chapter has been run."""
        project = smallest_book(tmp_path / "book")
        run(project, write_chapter(project, "x = 1"))
        (project.root / "notebooks/reference.toml").touch()
        monkeypatch.setattr(THIS, lambda: project)
        return project

    def test_with_a_damaged_file(self, book, capsys):
        for file, contents in DAMAGED.items():
            good = (book.root / file).read_bytes()
            for content, line in contents.items():
                (book.root / file).write_bytes(content.encode("latin1"))
                for command in "execute", "build":
                    ends(command, line, 2, capsys)
            (book.root / file).write_bytes(good)
        (result,) = book.results.iterdir()
        result.write_bytes(result.read_bytes()[:99])
        for command in "execute", "execute none.ipynb":  # which is not there
            ends(command, NOTEBOOK, 2, capsys)

    def test_that_is_not_there(self, monkeypatch, tmp_path, capsys):
        place = tmp_path / "lib" / "cdopt_tutorial" / "publish" / "project.py"
        monkeypatch.setattr("cdopt_tutorial.publish.project.__file__", str(place))
        ends("execute", NO_BOOK, 2, capsys)


DAMAGE = "checkpoint ...: it is damaged or truncated, or no checkpoint at all"
FOREIGN = "checkpoint ...: another program made it"
# What a checkpoint's parts are set to; None removes one.
PARTS = [
    {"words": None}, {"more": 1}, {"config": {"hidden": -1}}, {"words": ["a"]},
    {"weights": {"a": "a text"}},
]  # fmt: skip


def dumped(content) -> bytes:
    """What torch saves of it."""
    torch.save(content, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.usefixtures("no_process_starts")
class TestCheckpoint:
    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, tmp_path_factory) -> Path:
        file = tmp_path_factory.mktemp("saved") / "file"
        config = RNNConfig(embedding=6, hidden=5, seq_len=7, batch_size=4, max_steps=1)
        corpus = Grammar(num_words=9, branching=3).corpus(561, 100)
        run_locally(Job(config, corpus, keep=file))
        return file

    def test_of_another_program(self, saved, text, tmp_path, capsys):
        cases = [
            (dumped(torch.nn.Linear(2, 2).state_dict()), FOREIGN),
            (dumped({"what would run": os.mkdir}), DAMAGE),
            (pickle.dumps({"epoch": 1}), DAMAGE),
        ]
        for parts in PARTS:
            whole = (torch.load(saved) | parts).items()
            content = dumped({name: part for name, part in whole if part is not None})
            cases.append((content, "checkpoint ...: its parts can't be of one run"))
        for content, line in cases:
            (tmp_path / "file").write_bytes(content)
            ends(f"rnn --corpus {text} --resume {tmp_path}/file", line, 2, capsys)

    def test_with_any_flipped_byte_is_refused_or_the_same(self, saved, tmp_path):
        content, file = saved.read_bytes(), tmp_path / "file"
        whole = checkpoint.load(saved)
        for at in range(0, len(content), len(content) // 100):
            flipped = bytes([content[at] ^ 0xFF])
            file.write_bytes(content[:at] + flipped + content[at + 1 :])
            try:
                found = checkpoint.load(file)
            except ValueError as error:
                line = rf"checkpoint '{file}': it is damaged.*"
                assert re.fullmatch(line, str(error))
                continue
            assert max_difference(found.weights, whole.weights) == 0
            for name in ("config", "words", "epoch", "window", "losses"):
                assert getattr(found, name) == getattr(whole, name)
