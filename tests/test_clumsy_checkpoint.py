"""Checkpoints that can't be read, or of no such run: refused in one line."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from clumsy import ends

from cdopt_tutorial.data import Grammar, load_corpus
from cdopt_tutorial.parameter_server import Job, RNNConfig, run_locally

DAMAGED = "checkpoint ...: it is damaged or truncated, or no checkpoint of rnn"
OTHER_TEXT = "the checkpoint is of another text"
OTHER_MODEL = "the checkpoint has hidden 5, but this run 6"
LOCKED = "checkpoint ...: Permission denied"
LINES = [DAMAGED, OTHER_TEXT, OTHER_MODEL, LOCKED]

TEXT = "the cat sat on the mat , and the dog saw it .\n" * 100
CONFIG = RNNConfig(embedding=6, hidden=5, seq_len=7, batch_size=4, max_steps=1)
FLAGS = "--embedding 6 --hidden 5 --seq-len 7 --batch-size 4 --max-steps 1"


class Runs:
    """Code that a pickle would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class TestCheckpoint:
    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, tmp_path_factory) -> Path:
        file = tmp_path_factory.mktemp("saved") / "file"
        corpus = Grammar(num_words=9, branching=3).corpus(561, 100)
        run_locally(Job(CONFIG, corpus, keep=file))
        return file

    @pytest.fixture
    def refused(self, tmp_path, capsys):
        text = tmp_path / "text"
        text.write_text(TEXT)

        def refused(file, line, more=""):
            ends(f"rnn --corpus {text} {FLAGS} {more} --resume {file}", line, 2, capsys)

        return refused

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_of_someone_else(self, saved, refused, as_another):
        with as_another(saved.parent):
            refused(saved, LOCKED)

    def test_of_another_program(self, saved, refused, tmp_path):
        file, ran = tmp_path / "file", tmp_path / "ran"
        less, more = torch.load(saved), torch.load(saved) | {"more": 1}
        del less["words"]
        others = [1, 2], torch.nn.Linear(2, 2).state_dict(), Runs(ran), less, more
        for content in others:
            torch.save(content, file)
            refused(file, DAMAGED)
        for content in pickle.dumps({"epoch": 1}), b"It was a dark and stormy night.":
            file.write_bytes(content)
            refused(file, DAMAGED)
        assert not ran.exists()

    def test_that_is_truncated(self, saved, refused, tmp_path):
        whole, file = saved.read_bytes(), tmp_path / "file"
        for share in (0.0, 0.001, 0.5, 0.9, 0.999):
            file.write_bytes(whole[: int(share * len(whole))])
            refused(file, DAMAGED)

    def test_of_another_text(self, saved, refused):
        refused(saved, OTHER_TEXT)

    def test_of_another_model(self, saved, refused, tmp_path):
        own = torch.load(saved)
        own["words"] = list(load_corpus(tmp_path / "text").vocabulary.words)
        torch.save(own, tmp_path / "file")
        refused(tmp_path / "file", OTHER_MODEL, "--hidden 6")
