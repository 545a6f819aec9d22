"""Checkpoints: a training that goes on is the training that was never cut off."""

import multiprocessing
import os
import signal
from dataclasses import asdict, replace

import pytest
import torch

from cdopt_tutorial.data import Grammar
from cdopt_tutorial.engines import WorkerError
from cdopt_tutorial.parameter_server import Job, RNNConfig, check, run, run_locally
from cdopt_tutorial.parameter_server import checkpoint as checkpoints

# 20 windows of 7 x 4 tokens, and 3 more in a second pass; half of chance is dropout.
CONFIG = RNNConfig(
    embedding=6, hidden=5, num_layers=2, dropout=0.5, seq_len=7, batch_size=4,
    optimizer="adam", lr=0.01, lr_decay=0.5, epochs=2, max_steps=23, save_every=4,
    dtype="float64",
)  # fmt: skip
STILL = replace(CONFIG, dropout=0.0)  # without chance, alike on workers and without
TWO = replace(STILL, num_trainers=2)
CORPUS = Grammar(num_words=9, branching=3).corpus(561, 100)
LIMITS = {"deadline": 30.0}


def distributed(config, **where):
    return run(Job(config, CORPUS, **where), **LIMITS)


def local(config, **where):
    return [run_locally(Job(config, CORPUS, **where))]


def until(steps, config, file, train=distributed):
    """The checkpoint that a run leaves which is ended after some steps."""
    train(replace(config, max_steps=steps), keep=file)
    checkpoint = checkpoints.load(file)
    assert all(len(losses) == steps for losses in checkpoint.losses)
    return checkpoint


def assert_same(one, other, within=0.0):
    """The same losses at each step, and the same parameters at the end."""
    for mine, theirs in zip(one, other, strict=True):
        assert len(mine.losses) == 23
        assert mine.losses == pytest.approx(theirs.losses, rel=0, abs=within)
        assert mine.weights.keys() == theirs.weights.keys()
        for name, weight in mine.weights.items():
            close = torch.allclose(weight, theirs.weights[name], rtol=0, atol=within)
            assert close, name
    assert len(one[0].weights) == 1 + 8 + 2


@pytest.fixture(scope="module")
def whole():
    """A run that was not cut off, and keeps nothing."""
    return distributed(CONFIG)


@pytest.mark.xdist_group("checkpoint")
class TestResume:
    def test_is_the_run_that_was_not_cut_off(self, whole, tmp_path):
        """Cut off within a pass, and between two."""
        resume = until(8, CONFIG, tmp_path / "file")
        assert (resume.epoch, resume.window) == (0, 8)
        parts = {"resume": resume, "keep": tmp_path / "more"}
        distributed(replace(CONFIG, max_steps=20), **parts)
        resume = checkpoints.load(tmp_path / "more")
        assert (resume.epoch, resume.window) == (1, 0)
        resumed = distributed(CONFIG, resume=resume)
        assert_same(resumed, whole)
        assert resumed[0].tokens == 3 * 4 * 7

    def test_needs_everything_that_is_kept(self, tmp_path):
        resume = until(8, STILL, tmp_path / "file", local)
        (whole,) = local(STILL)
        for lost in ({"optimizer": {}}, {"window": 7}, {"hidden": zeros(resume)}):
            (other,) = local(STILL, resume=replace(resume, **lost))
            assert other.losses[:8] == whole.losses[:8]
            assert max(gaps(other.losses[8:], whole.losses[8:])) > 1e-6

    @pytest.mark.parametrize(
        "more",
        [
            {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.0},
            {"manifold": "stiefel"}, {"manifold": "stiefel", "per_gate": True},
            {"manifold": "stiefel", "where": "server"}, {"manifold": "oblique"},
            {"manifold": "oblique", "where": "server"}, {"dtype": "float32"},
        ],
        ids=str,
    )  # fmt: skip
    def test_of_every_kind_of_run(self, more, tmp_path):
        config = replace(STILL, **more)
        resume = until(8, config, tmp_path / "file", local)
        (resumed,), (whole,) = local(config, resume=resume), local(config)
        assert resumed.losses == whole.losses and len(whole.losses) == 23

    def test_of_two_trainers(self, tmp_path):
        resume = until(8, TWO, tmp_path / "file")
        assert_same(distributed(TWO, resume=resume), distributed(TWO), 1e-12)

    def test_a_complete_run_is_only_evaluated(self, tmp_path):
        for config in (STILL, replace(STILL, max_steps=None, epochs=1)):
            (first,) = local(config, keep=tmp_path / "file")
            resume = checkpoints.load(tmp_path / "file")
            (again,) = local(config, resume=resume)
            assert (again.tokens, again.losses) == (0, first.losses)
            assert again.progress[-1].valid_loss == first.progress[-1].valid_loss
            assert again.progress[-1].epoch == first.progress[-1].epoch

    def test_with_less_steps_than_are_done_is_only_evaluated(self, tmp_path):
        resume = until(8, STILL, tmp_path / "file", local)
        (history,) = local(replace(STILL, max_steps=3), resume=resume)
        assert history.tokens == 0
        assert history.progress[-1].valid_loss is not None

    def test_may_ask_for_more_passes(self, tmp_path):
        local(replace(STILL, epochs=1, max_steps=None), keep=tmp_path / "file")
        resumed = local(STILL, resume=checkpoints.load(tmp_path / "file"))
        assert_same(resumed, local(STILL))


class TestAnyNumberOfWorkers:
    def test_a_distributed_run_goes_on_in_one_process(self, tmp_path):
        resume = until(8, TWO, tmp_path / "file")
        assert_same(local(TWO, resume=resume), local(STILL), 1e-10)

    @pytest.mark.parametrize("config", [STILL, TWO], ids=["one trainer", "two"])
    def test_one_process_goes_on_distributed(self, config, tmp_path):
        resume = until(8, STILL, tmp_path / "file", local)
        resumed, whole = distributed(config, resume=resume)[0], local(STILL)[0]
        if config is STILL:
            assert resumed.losses == pytest.approx(whole.losses, abs=1e-10)
        for name, weight in whole.weights.items():
            torch.testing.assert_close(resumed.weights[name], weight)

    def test_losses_of_another_number_of_trainers_are_the_batch_s(self, tmp_path):
        three = until(4, replace(TWO, num_trainers=3), tmp_path / "file")
        assert len(three.losses) == 3
        whole = local(STILL)[0].losses[:4]
        for trainer in (0, 1):
            assert three.losses_of(trainer, 2) == pytest.approx(whole, abs=1e-10)
        assert three.losses_of(1, 3) == three.losses[1]


@pytest.mark.xdist_group("checkpoint")
class TestDeath:
    @pytest.mark.parametrize("victim", ["ps", "trainer0"])
    def test_of_a_worker_leaves_a_checkpoint_to_go_on_from(
        self, victim, whole, tmp_path
    ):
        def kill(_, note):
            if note.step >= 10:
                for child in multiprocessing.active_children():
                    if child.name == victim:
                        child.kill()

        file = tmp_path / "file"
        with pytest.raises(WorkerError, match=f"{victim} was killed by SIGKILL"):
            run(Job(CONFIG, CORPUS, keep=file), **LIMITS, on_report=kill)
        resume = checkpoints.load(file)
        assert len(resume.losses[0]) >= 8
        assert_same(distributed(CONFIG, resume=resume), whole)

    def test_of_a_trainer_that_others_wait_for_ends_the_run(self, tmp_path):
        # The second trainer alone can't go on: its columns have no hidden state.
        resume = until(8, STILL, tmp_path / "file", local)
        bad = replace(resume, hidden=tuple(h[:, :3] for h in resume.hidden))
        with pytest.raises(WorkerError, match="trainer1 raised") as caught:
            distributed(TWO, resume=bad)
        assert caught.value.worker == "trainer1"


class TestSave:
    @pytest.fixture
    def state(self):
        config = replace(STILL, max_steps=1)
        (history,) = local(config)
        return checkpoints.Checkpoint(
            asdict(config), list(CORPUS.vocabulary.words), history.weights, {},
            epoch=0, window=1, hidden=(torch.zeros(2, 4, 5, dtype=torch.float64),) * 2,
            losses=[[1.0]],
        )  # fmt: skip

    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
    def test_that_fails_leaves_the_last_one(self, state, error, tmp_path, monkeypatch):
        file = tmp_path / "file"
        checkpoints.save(file, state)

        def fail(_):
            raise error

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(type(error)):
            checkpoints.save(file, replace(state, window=2))
        assert checkpoints.load(file).window == 1
        assert list(tmp_path.iterdir()) == [file]

    def test_that_is_killed_leaves_the_last_one(self, state, tmp_path):
        file = tmp_path / "file"
        checkpoints.save(file, state)

        def stop_halfway(opened):
            os.ftruncate(opened, 100)
            os.kill(os.getpid(), signal.SIGKILL)

        if (child := os.fork()) == 0:
            os.fsync = stop_halfway
            try:
                checkpoints.save(file, state)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert checkpoints.load(file).window == 1
        (left,) = set(tmp_path.iterdir()) - {file}
        assert left.name.startswith(".")
        with pytest.raises(ValueError, match="truncated"):
            checkpoints.load(left)

    def test_to_a_folder_that_is_gone_fails_by_name(self, tmp_path):
        with pytest.raises(WorkerError, match="^trainer0 can't write .*: No such file"):
            distributed(TWO, keep=tmp_path / "gone" / "file")


class TestLoad:
    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tmp_path_factory):
        file = tmp_path_factory.mktemp("whole") / "file"
        local(replace(STILL, max_steps=1), keep=file)
        return file.read_bytes()

    def refused(self, path):
        with pytest.raises(ValueError) as caught:
            checkpoints.load(path)
        message = str(caught.value)
        assert message.startswith(f"checkpoint {str(path)!r}: ")
        assert "\n" not in message
        return message

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9, 0.999])
    def test_refuses_a_truncated_file(self, whole, share, tmp_path):
        (tmp_path / "file").write_bytes(whole[: int(share * len(whole))])
        assert "truncated" in self.refused(tmp_path / "file")

    @pytest.mark.parametrize("kind", ["state_dict", "text", "code"])
    def test_refuses_a_foreign_file(self, kind, tmp_path):
        file = tmp_path / "file"
        ran = tmp_path / "ran"
        match kind:
            case "state_dict":
                torch.save(torch.nn.Linear(2, 2).state_dict(), file)
            case "text":
                file.write_text("It was a dark and stormy night.\n")
            case "code":
                torch.save(Runs(ran), file)
        message = self.refused(file)
        assert "another program" in message or "no checkpoint at all" in message
        assert not ran.exists()


class Runs:
    """Code that a pickle would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class TestFit:
    def test_refuses_another_model(self, tmp_path):
        resume = until(1, STILL, tmp_path / "file", local)
        changes = {
            "embedding": 7, "hidden": 6, "num_layers": 1, "batch_size": 5, "seq_len": 6,
            "optimizer": "sgd", "dtype": "float32",
        }  # fmt: skip
        for name, value in changes.items():
            message = f"has {name} {getattr(STILL, name)!r}, but {value!r} was asked"
            with pytest.raises(ValueError, match=message):
                check(Job(replace(STILL, **{name: value}), CORPUS, resume))

    def test_refuses_another_text(self, tmp_path):
        resume = until(8, STILL, tmp_path / "file", local)
        for grammar, why in (
            (Grammar(num_words=8, branching=3).corpus(561, 100), "9 words.* has 8"),
            (Grammar(num_words=9, branching=3).corpus(150, 100), "8 windows.* has 6"),
        ):
            with pytest.raises(ValueError, match=f"another text: .*{why}"):
                check(Job(STILL, grammar, resume))


def test_no_trainer_goes_on_while_the_first_one_evaluates():
    # It would switch the server's dropout on; without learning, nothing else differs.
    corpus = Grammar(num_words=9, branching=3).corpus(100, 3000)
    config = replace(TWO, dropout=0.5, lr=1e-300, epochs=6, max_steps=None)
    first, _ = run(Job(config, corpus), **LIMITS)
    found = [note.valid_loss for note in first.progress if note.valid_loss]
    alone = run_locally(Job(replace(config, epochs=1), corpus))
    assert found == pytest.approx([alone.progress[-1].valid_loss] * 6, rel=1e-12)


def zeros(checkpoint):
    return tuple(map(torch.zeros_like, checkpoint.hidden))


def gaps(one, other):
    return [abs(a - b) for a, b in zip(one, other, strict=True)]
