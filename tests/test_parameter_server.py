"""Chapters 2 and 4: each distributed training equals the same one in one process."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import rnn_twin
import torch
from locks import Second
from roles import WAYS
from torch import nn
from torch.nn.utils import parametrize

from cdopt_tutorial.calls import alone, apply, gradients, reference, remote
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.hybrid import HybridConfig
from cdopt_tutorial.hybrid.system import OriginalStep
from cdopt_tutorial.parameter_server import (
    Job,
    RNNConfig,
    Trainer,
    build_all,
    check,
    run,
    run_locally,
    traffic,
)
from cdopt_tutorial.parameter_server.system import Owner
from cdopt_tutorial.run import Role, Trace, launch, serve
from cdopt_tutorial.training import measured_bytes

EXACT = RNNConfig(
    embedding=6, hidden=5, dropout=0.0, seq_len=7, batch_size=5, optimizer="sgd",
    lr=0.5, momentum=0.0, clip=None, epochs=3, max_steps=50, dtype="float64",
)  # fmt: skip
GRAMMAR = Grammar(num_words=9, branching=3)
CORPUS = GRAMMAR.corpus(700, 200)
SHORT = GRAMMAR.corpus(300, 50)  # of 9 windows

#: For every constrained part, its manifold and where it is.
CONSTRAINED = {
    "stacked": {"manifold": "stiefel"},
    "per gate": {"manifold": "stiefel", "per_gate": True},
    "oblique LSTM": {"manifold": "oblique"},
    "Stiefel decoder": {"manifold": "stiefel", "where": "server"},
    "unit word vectors": {"manifold": "oblique", "where": "server"},
}
NEAR = replace(EXACT, lr=0.1, momentum=0.9, clip=1.0, penalty_param=0.5)
CLIPPED = {"momentum": 0.9, "lr": 0.1, "clip": 0.05, "lr_decay": 0.5}
ADAM = {"optimizer": "adam", "lr": 0.01}
#: By what is constrained, if anything is: how the rest is trained.
EXACTLY = {
    "free, in logits": {"cut": "logits"} | ADAM,
    "free": {"num_trainers": 2} | CLIPPED,
    "stacked": {"num_trainers": 3, "clip": None},  # with uneven parts
    "per gate": CLIPPED,
    "oblique LSTM": ADAM,
    "Stiefel decoder": {"num_trainers": 2, "cut": "logits"} | CLIPPED,
    "unit word vectors": {"num_trainers": 2} | ADAM,
}


class Two(nn.Module):
    """Two numbers, the second of which a step may leave out."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))
        self.b = nn.Parameter(torch.ones(()))

    def total(self, with_b):
        return self.a + self.b if with_b else self.a * 1.0

    def values(self):
        return self.a.item(), self.b.item()


HALF = RNNConfig(optimizer="sgd", lr=0.5, momentum=0.0, clip=None)


def step_twice():
    """Both numbers after a step of both and one of the first."""
    two = remote("ps", Two)
    owner = remote("ps", Owner, {"two": two}, HALF)
    for with_b in (True, False):
        with gradients.context() as context:
            gradients.backward(context, gradients.call(two, Two.total, with_b))
            owner.rpc_sync().step(context, 1.0)
    return apply(two, Two.values)


class TestEquality:
    @pytest.mark.parametrize("way", WAYS)
    def test_with_one_process(self, way):
        for name, how in EXACTLY.items():
            # A pass and a part of the next.
            config = replace(NEAR, max_steps=11, **how, **CONSTRAINED.get(name, {}))
            job, trace = Job(config, SHORT), Trace()
            distributed = run(job, attach=WAYS[way], trace=trace)
            local, start = run_locally(job), build_all(9, config).state_dict()
            called = {call.method for call in trace.calls}
            assert ("_backward" in called) == (way == "cut")  # which is in Python
            assert len(local.losses) == 11
            assert all(history.staleness == [0] * 11 for history in distributed)
            assert max_difference(local.weights, start) > 0.01  # they moved
            assert max_difference(distributed[0].weights, local.weights) <= 5e-11, name
            if config.num_trainers == 1:
                assert distributed[0].losses == pytest.approx(local.losses, abs=5e-10)
            if config.constrained:
                assert_feasible(distributed[0], local)


def assert_feasible(there, here):
    """Near the manifold while they train, as far off as each other, then on it."""
    assert len(there.feasibility) == len(here.feasibility) == 11
    one, other = there.feasibility[-1], here.feasibility[-1]
    assert one.weight == pytest.approx(other.weight, rel=1e-8)
    assert one.mapped == pytest.approx(other.mapped, rel=1e-6, abs=1e-12)
    assert one.weight > 1e-9  # penalised, not exact
    assert max(found.mapped for found in there.feasibility) < 0.05
    assert there.projected.feasibility.weight < 1e-12
    before, after = there.progress[-1].valid, there.projected.score
    assert after.loss == pytest.approx(before.loss, rel=0.01)


class TestTwin:
    """Compared with plain torch: its own model, windows, schedule and evaluation."""

    HOW = {
        "clipped momentum": {"momentum": 0.9, "lr": 0.2, "clip": 0.05},
        "adam": {"optimizer": "adam", "lr": 0.02, "clip": 0.5},
    }
    CONFIG = replace(
        EXACT, dropout=0.4, lr_decay=0.5, epochs=2, max_steps=None, save_every=6
    )

    @pytest.mark.parametrize("how", HOW.values(), ids=HOW)
    def test_is_the_same_training(self, how):
        config = replace(self.CONFIG, **how)
        torch.manual_seed(5)
        twin = rnn_twin.Twin(9, config)
        history = run_locally(Job(config, CORPUS, begin=twin.state_dict()))
        losses, valid = rnn_twin.train(twin, CORPUS, config)
        assert len(losses) == 40
        assert valid[1] < valid[0] - 0.01
        assert history.losses == pytest.approx(losses, rel=1e-10)
        assert max_difference(history.weights, twin.state_dict()) < 1e-10
        assert history.perplexity == pytest.approx(math.exp(valid[1]), rel=1e-10)
        notes = [note for note in history.progress if note.valid]
        assert [note.valid.loss for note in notes] == pytest.approx(valid, rel=1e-10)
        assert [(n.epoch, n.step) for n in notes] == [(1, 20), (2, 40)]
        assert history.tokens == 1390
        assert history.progress[0].train_loss == pytest.approx(sum(losses[:10]) / 10)

    def test_the_server_s_dropout_is_drawn_there_and_off_while_it_evaluates(self):
        twin = rnn_twin.Twin(9, self.CONFIG)
        (history,) = run(Job(self.CONFIG, CORPUS, begin=twin.state_dict()))
        how = replace(self.CONFIG, clip=1e9)
        losses, valid = rnn_twin.train(twin, CORPUS, how, stream=1)
        assert history.losses == pytest.approx(losses, rel=1e-10)
        notes = [note.valid.loss for note in history.progress if note.valid]
        assert notes == pytest.approx(valid, rel=1e-10)

    @pytest.mark.parametrize("name", ["decoder.decoder.bias", "bias"])
    def test_does_not_begin_with_what_is_no_parameter(self, name):
        message = rf"begin has {name} \(3,\), but .*embedding"
        with pytest.raises(ValueError, match=message):
            check(Job(EXACT, CORPUS, begin={name: torch.zeros(3)}))


class TestOptimizer:
    def test_does_not_step_with_a_stale_gradient(self):
        # As torch's DistributedOptimizer does with an optimizer of one's own.
        roles = {"ps": Role(serve), "trainer0": Role(step_twice)}
        there = [launch(roles, attach=way)["trainer0"] for way in WAYS.values()]
        assert [*there, step_twice()] == [(0.0, 0.5)] * 3

    @pytest.mark.parametrize("ask", ["squared_norm", "step", "original"])
    def test_of_two_trainers_at_once_sees_the_gradients_of_one(self, ask, monkeypatch):
        two = Two()
        kept = {"one": {two.a: torch.tensor(0.5)}, "other": {two.b: torch.tensor(2.0)}}
        monkeypatch.setattr(gradients, "_kept_gradients", kept)
        if ask == "original":  # chapter 5's, with an optimizer for each trainer
            owner = OriginalStep(reference(two), HybridConfig(lr=0.5, momentum=0.0))
            optimizer, (first, *second) = owner._optimizers[0], [(0, "one"), 1, "other"]
        else:
            owner = Owner({"two": reference(two)}, HALF)
            optimizer, first = owner._optimizer, ("one", 1.0)
            second = ("other", 1.0) if ask == "step" else ("other",)
        other = Second(lambda: getattr(owner, ask.replace("original", "step"))(*second))
        move = optimizer.step

        def move_while_another_asks():
            other.come()
            move()

        monkeypatch.setattr(owner, "_lock", other)
        monkeypatch.setattr(optimizer, "step", move_while_another_asks)
        owner.step(*first)
        assert other.done() == {"step": 1, "squared_norm": 4.0, "original": None}[ask]
        assert two.values() == (0.75, 1.0 if ask == "squared_norm" else 0.0)


class TestModel:
    def test_each_part_begins_with_a_seed_of_its_own(self):
        plain = nn.ModuleList([nn.Embedding(9, 6), nn.LSTM(6, 5), nn.Linear(5, 9)])
        for number, layer in enumerate(plain):
            torch.manual_seed(3 * 2 + number)
            layer.reset_parameters()
            if not isinstance(layer, nn.LSTM):
                nn.init.uniform_(layer.weight, -0.1, 0.1)
        nn.init.zeros_(plain[2].bias)
        before = torch.get_rng_state()
        parts = build_all(9, replace(EXACT, seed=2)).parameters()
        assert torch.equal(torch.get_rng_state(), before)  # nothing else was drawn
        for found, weight in zip(parts, plain.double().parameters(), strict=True):
            assert torch.equal(found, weight)

    def test_the_cuts_differ_in_what_comes_back(self):
        corpus = Grammar(num_words=200, branching=3).corpus(1500, 200)
        wide = replace(EXACT, embedding=200, hidden=200, seq_len=20)
        for cut, numbers in ("loss", 200 + 200), ("logits", 200 + 200 + 200):
            config = replace(wide, cut=cut)
            # Of each of 20 x 5 tokens: 8-byte numbers there and back, and the index;
            # the target only where the server computes the loss.
            sent = 20 * 5 * (2 * numbers * 8 + 8 * (2 if cut == "loss" else 1))
            assert traffic.expected_bytes(config, len(corpus.vocabulary)) == sent
            measured = traffic.measured_bytes(Job(config, corpus))
            assert sent < measured < 1.02 * sent
        assert math.isnan(measured_bytes(run, job=None, most=0))  # of no other steps


class TestTrainers:
    def test_asynchronous_ones_are_stale_and_learn(self):
        config = replace(EXACT, num_trainers=2, sync=False, **ADAM)
        histories = run(Job(config, CORPUS))
        stale = [s for history in histories for s in history.staleness]
        assert max(stale) >= 1
        assert len(histories[0].losses) == len(histories[1].losses) > 30
        for history in histories:
            assert sum(history.losses[-10:]) < 0.9 * sum(history.losses[:10])

    def test_a_step_during_the_forward_pass_makes_stale(self):
        trainer = Trainer(0, Job(replace(EXACT, num_trainers=2, sync=False), CORPUS))
        window = *next(trainer.stream.windows()), trainer.hidden(0)
        assert trainer.step(*window)[1] == 0
        whole = trainer.model.loss

        def loss_while_another_steps(*args):
            trainer.owners[0].rpc_sync().step(None, 1.0)
            return whole(*args)

        trainer.model.loss = loss_while_another_steps
        assert [trainer.step(*window)[1] for _ in range(2)] == [1, 1]


def test_what_the_constraint_means():
    built = {n: build_all(9, replace(EXACT, **how)) for n, how in CONSTRAINED.items()}
    for parts in built.values():
        assert sum(map(parametrize.is_parametrized, parts.modules())) == 1
    lstms = ("stacked", "per gate", "oblique LSTM")
    stacked, gates, rows = (built[name]["rnn"].weight_hh_l0 for name in lstms)
    words = built["unit word vectors"]["embedding"].encoder.weight
    decoder = built["Stiefel decoder"]["decoder"].decoder.weight
    for weight in (stacked, *gates.chunk(4), decoder):
        assert torch.allclose(weight.mT @ weight, torch.eye(5, dtype=torch.float64))
    for weight in (words, rows):
        assert torch.allclose(weight.norm(dim=1), weight.new_ones(()))


def test_the_penalty_reaches_the_server():
    # The original's covers the trainer's own model only.
    config, trace = replace(NEAR, **CONSTRAINED["Stiefel decoder"]), Trace()
    (history,) = run(Job(config, CORPUS), trace=trace)
    calls = Counter(call.method for call in trace.calls)
    back = Counter(span.name for span in trace.spans if span.worker == "ps")
    steps = calls["penalty_on_cpu"]
    assert steps == len(history.losses)
    parts = "decoder", "embedding", "penalty"
    assert back == {f"{part} backward": steps for part in parts}
    loose = run_locally(Job(replace(config, penalty_param=1e-12), CORPUS))
    assert history.feasibility[-1].weight < 0.3 * loose.feasibility[-1].weight


def test_each_asynchronous_trainer_adds_the_penalty():
    config = replace(NEAR, manifold="stiefel", num_trainers=2, sync=False)
    with alone():
        trainer = Trainer(1, Job(config, CORPUS))
    off = {name: 1.1 * weight for name, weight in trainer.gather("weights").items()}
    trainer.on_owners("load", off, {})
    loss, mean, _ = trainer.loss(*next(trainer.stream.windows()), trainer.hidden(0))
    penalty = trainer.constraints.penalty().item()
    assert loss.item() - mean == pytest.approx(penalty, rel=1e-9)
    assert penalty > 0.1
