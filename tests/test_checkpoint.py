"""Checkpoints: a resumed training is the one that was never interrupted."""

import os
import signal
from dataclasses import asdict, replace

import pytest

from cdopt_tutorial.data import Grammar
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import Job, RNNConfig, check, run, run_locally
from cdopt_tutorial.parameter_server import checkpoint as checkpoints

# 20 windows of 7 x 4 tokens, and 3 more in a second pass.
CONFIG = RNNConfig(
    embedding=6, hidden=5, dropout=0.5, seq_len=7, batch_size=4, optimizer="adam",
    lr=0.01, lr_decay=0.5, epochs=2, max_steps=23, save_every=4, dtype="float64",
)  # fmt: skip
STILL = replace(CONFIG, dropout=0.0)  # the same on workers and in one process
THREE = replace(STILL, num_trainers=3)  # with 2, 1 and 1 columns
CORPUS = Grammar(num_words=9, branching=3).corpus(561, 100)


def on_workers(config, steps=23, corpus=CORPUS, **where):
    job = Job(replace(config, max_steps=steps), corpus, **where)
    return run(job, deadline=240.0)  # for a run that hangs, on however slow a machine


def local(config, steps=23, **where):
    return run_locally(Job(replace(config, max_steps=steps), CORPUS, **where))


def until(steps, config, file):
    """The checkpoint of a run that ended after some steps."""
    local(config, steps, keep=file)
    return checkpoints.load(file)


def assert_same(one, other):
    """The same losses at each step, and the same parameters at the end."""
    assert one.losses == pytest.approx(other.losses, rel=0, abs=1e-10)
    assert len(one.losses) == 23
    assert max_difference(one.weights, other.weights) <= 1e-10


@pytest.mark.xdist_group("checkpoint")
class TestOnWorkers:
    def test_is_the_run_that_was_not_cut_off(self, tmp_path):
        (whole,) = on_workers(CONFIG)
        file, resume = tmp_path / "file", None
        # Within a pass, and between two.
        for steps, place in (8, (0, 8)), (20, (1, 0)):
            on_workers(CONFIG, steps, resume=resume, keep=file)
            resume = checkpoints.load(file)
            assert (resume.epoch, resume.window) == place
            assert len(resume.losses) == steps
        (resumed,) = on_workers(CONFIG, resume=resume)
        assert_same(resumed, whole)
        assert resumed.tokens == 3 * 4 * 7

    def test_goes_on_with_another_number_of_workers(self, tmp_path):
        whole, of_one = local(STILL), until(8, STILL, tmp_path / "one")
        on_workers(THREE, 8, keep=tmp_path / "three")
        of_three = checkpoints.load(tmp_path / "three")
        assert_same(local(STILL, resume=of_three), whole)
        for saved, number in (of_three, 3), (of_three, 2), (of_one, 3):
            config = replace(STILL, num_trainers=number)
            histories = on_workers(config, resume=saved)
            assert max_difference(histories[0].weights, whole.weights) <= 1e-10
            for history in histories:
                assert history.losses[:8] == pytest.approx(whole.losses[:8])
                assert len(history.losses) == 23


KINDS = (
    {"optimizer": "sgd", "momentum": 0.0, "dtype": "float32"},
    {"manifold": "stiefel", "per_gate": True, "optimizer": "sgd"},
    {"manifold": "oblique", "where": "server"},
)


def test_every_kind_of_run_is_resumed(tmp_path):
    for more in KINDS:
        config = replace(STILL, **more)
        resume = until(8, config, tmp_path / "file")
        resumed, whole = local(config, resume=resume), local(config)
        assert resumed.losses == whole.losses and len(whole.losses) == 23, more


def test_a_complete_run_is_only_evaluated_unless_asked_for_more(tmp_path):
    whole, once = local(STILL, keep=tmp_path / "whole"), replace(STILL, epochs=1)
    done = local(once, keep=tmp_path / "once")
    after_one = checkpoints.load(tmp_path / "once")
    assert_same(local(STILL, resume=after_one), whole)
    after_all = checkpoints.load(tmp_path / "whole")
    for config, first, resume in (STILL, whole, after_all), (once, done, after_one):
        for steps in (23, 3):  # fewer than are done
            again = local(config, steps, resume=resume)
            assert (again.tokens, again.losses) == (0, first.losses)
            last, before = again.progress[-1], first.progress[-1]
            assert (last.valid, last.epoch) == (before.valid, before.epoch)


def test_that_is_killed_leaves_the_last_one(tmp_path):
    file = tmp_path / "file"
    state = until(1, STILL, file)

    def stop_halfway(opened):
        os.ftruncate(opened, 100)
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        os.fsync = stop_halfway
        try:
            checkpoints.save(file, replace(state, window=2))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert checkpoints.load(file).window == 1
    (left,) = set(tmp_path.iterdir()) - {file}
    with pytest.raises(ValueError, match="truncated"):
        checkpoints.load(left)


# What a checkpoint of a constrained run does not fit.
OTHERS = {
    "embedding": 7, "hidden": 6, "batch_size": 5, "seq_len": 6, "optimizer": "sgd",
    "dtype": "float32", "manifold": "oblique", "where": "server", "per_gate": True,
}  # fmt: skip


def test_another_model_or_text_is_refused(tmp_path):
    resume, config = until(8, STILL, tmp_path / "f"), replace(STILL, manifold="stiefel")
    constrained = replace(resume, config=asdict(config))
    for name, value in OTHERS.items():
        message = f"the checkpoint has {name} {getattr(config, name)!r}, but {value!r} "
        with pytest.raises(ValueError, match=f"^{message}was asked for$"):
            check(Job(replace(config, **{name: value}), CORPUS, constrained))
    for words, length in (8, 561), (9, 150):
        other = Grammar(num_words=words, branching=3).corpus(length, 100)
        with pytest.raises(ValueError, match="of another text"):
            check(Job(STILL, other, resume))


def test_no_trainer_goes_on_while_the_first_one_evaluates():
    # It would switch the server's dropout on; without learning, nothing else differs.
    corpus = Grammar(num_words=9, branching=3).corpus(100, 1500)
    config = replace(CONFIG, num_trainers=2, lr=1e-300, epochs=3)
    first, _ = on_workers(config, None, corpus)
    found = [note.valid.loss for note in first.progress if note.valid]
    alone = run_locally(Job(replace(config, epochs=1), corpus))
    assert found == pytest.approx([alone.progress[-1].valid.loss] * 3, rel=1e-12)
