"""Checkpoints that are damaged, or of another run: refused in one line."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from clumsy import ends

from cdopt_tutorial.data import Grammar
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import Job, RNNConfig, checkpoint, run_locally

DAMAGED = "checkpoint ...: it is damaged or truncated, or no checkpoint at all"
PARTS_APART = "checkpoint ...: its parts can't be of one run"
# What a checkpoint's parts are set to; None removes a part.
PARTS = {
    "one less": {"words": None},
    "one more": {"more": 1},
    "config: a list": {"config": [1]},
    "config: unknown": {"config": {"colour": "red"}},
    "config: no width": {"config": {"hidden": -1}},
    "words: none": {"words": 3},
    "words: fewer": {"words": ["a"]},
    "weights: a list": {"weights": [1]},
    "weights: none": {"weights": {}},
    "weights: numbers": {"weights": {"a": 1.0}},
}
# The same for the first of its weights.
WEIGHTS = {"none": None, "another shape": torch.zeros(2, 2), "no tensor": "a text"}
FOREIGN = "checkpoint ...: another program made it"
FLIPPED = "checkpoint ...: it is damaged: ... is not what was written"
OTHER_TEXT = "the checkpoint is of another text: ..."
LOCKED = "checkpoint ...: Permission denied"

CONFIG = RNNConfig(embedding=6, hidden=5, seq_len=7, batch_size=4, max_steps=1)
FLAGS = "--embedding 6 --hidden 5 --seq-len 7 --batch-size 4 --max-steps 1"


def without(parts):
    return {name: part for name, part in parts.items() if part is not None}


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
    def refused(self, text, capsys):
        def refused(file, line):
            ends(f"rnn --corpus {text} {FLAGS} --resume {file}", line, 2, capsys)

        return refused

    @pytest.mark.parametrize("case", [*PARTS, *WEIGHTS])
    def test_whose_parts_do_not_belong_together(self, case, saved, refused, tmp_path):
        content = torch.load(saved) | PARTS.get(case, {})
        if case in WEIGHTS:
            first = next(iter(content["weights"]))
            content["weights"] = without(content["weights"] | {first: WEIGHTS[case]})
        torch.save(without(content), tmp_path / "file")
        refused(tmp_path / "file", PARTS_APART)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_of_someone_else(self, saved, refused, as_another):
        with as_another(saved.parent):
            refused(saved, LOCKED)

    def test_of_another_program(self, refused, tmp_path):
        file, ran = tmp_path / "file", tmp_path / "ran"
        for content in [1, 2], torch.nn.Linear(2, 2).state_dict():
            torch.save(content, file)
            refused(file, FOREIGN)
        torch.save(Runs(ran), file)
        refused(file, DAMAGED)
        assert not ran.exists()
        for content in pickle.dumps({"epoch": 1}), b"It was a dark and stormy night.":
            file.write_bytes(content)
            refused(file, DAMAGED)

    def test_that_is_truncated(self, saved, refused, tmp_path):
        whole, file = saved.read_bytes(), tmp_path / "file"
        for share in (0.0, 0.001, 0.5, 0.9, 0.999):
            file.write_bytes(whole[: int(share * len(whole))])
            refused(file, DAMAGED)

    def test_of_another_run(self, saved, refused):
        refused(saved, OTHER_TEXT)

    def test_with_a_flipped_byte_in_its_weights(self, saved, refused, tmp_path):
        content = bytearray(saved.read_bytes())
        weight = torch.load(saved)["weights"]["decoder.decoder.weight"]
        at = content.index(weight.numpy().tobytes())
        content[at] ^= 1
        (tmp_path / "file").write_bytes(content)
        refused(tmp_path / "file", FLIPPED)

    def test_with_any_flipped_byte_is_refused_or_the_same(self, saved, tmp_path):
        content, file = saved.read_bytes(), tmp_path / "file"
        whole = checkpoint.load(saved)
        for at in range(0, len(content), len(content) // 100):
            flipped = bytes([content[at] ^ 0xFF])
            file.write_bytes(content[:at] + flipped + content[at + 1 :])
            try:
                found = checkpoint.load(file)
            except ValueError as error:
                assert "\n" not in str(error) and str(file) in str(error)
                continue
            assert max_difference(found.weights, whole.weights) == 0
            for name in ("config", "words", "epoch", "window", "losses"):
                assert getattr(found, name) == getattr(whole, name)
