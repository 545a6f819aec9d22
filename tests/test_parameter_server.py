"""Chapters 2 and 4: each distributed training equals the same one in one process."""

import math
import time
from dataclasses import replace

import pytest
import rnn_twin
import torch
from locks import Second
from roles import WAYS
from torch import nn

from cdopt_tutorial.calls import alone, apply, gradients, reference, remote
from cdopt_tutorial.constraints import Constraints
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
    checkpoint,
    run,
    run_locally,
    traffic,
)
from cdopt_tutorial.parameter_server.model import build
from cdopt_tutorial.parameter_server.system import Owner
from cdopt_tutorial.run import Role, Trace, launch, serve
from cdopt_tutorial.training import measured_bytes

EXACT = RNNConfig(
    embedding=6, hidden=5, num_layers=2, dropout=0.0, seq_len=7, batch_size=5,
    optimizer="sgd", lr=0.5, momentum=0.0, clip=None, epochs=3, max_steps=50,
    dtype="float64",
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
    "stacked": {"num_trainers": 3},  # with uneven parts
    "per gate": CLIPPED,
    "oblique LSTM": ADAM,
    "Stiefel decoder": {"num_trainers": 2, "cut": "logits"} | CLIPPED,
    "unit word vectors": {"num_trainers": 2} | ADAM,
}


def play(role, *args, **options):
    """What a trainer returns from its role, beside a server."""
    roles = {"ps": Role(serve), "trainer0": Role(role, args)}
    return launch(roles, **options)["trainer0"]


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


def step_owner_twice():
    """Each number after a step of both and one of the first; by an owner.

    Also ‖g‖² of each step, and how many gradients the owner has kept.
    """
    two = remote("ps", Two)
    owner = remote("ps", Owner, {"two": two}, HALF)
    seen, norms = [], []
    for with_b in (True, False):
        with gradients.context() as context:
            gradients.backward(context, gradients.call(two, Two.total, with_b))
            norms.append(owner.rpc_sync().squared_norm(context))
            owner.rpc_sync().step(context, 1.0)
        seen.append(apply(two, Two.values))
    kept = apply(owner, number_kept)
    return [list(values) for values in zip(*seen, strict=True)], norms, kept


def number_kept(_):
    return len(gradients._kept_gradients)


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
            one, other = distributed[0].feasibility, local.feasibility
            assert len(one) == len(other) == (11 if config.constrained else 0)
            if one:
                assert one[-1].weight == pytest.approx(other[-1].weight, rel=1e-8)
                assert one[-1].mapped == pytest.approx(other[-1].mapped, rel=1e-6)
                free = Job(replace(config, manifold="none", per_gate=False), SHORT)
                assert local.losses[-1] != run_locally(free).losses[-1]


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
    def test_is_the_same_training(self, how, tmp_path):
        config = replace(self.CONFIG, **how)
        torch.manual_seed(5)
        twin = rnn_twin.Twin(9, config)
        begin = twin.named()
        losses, valid = rnn_twin.train(twin, CORPUS, config)
        assert len(losses) == 40
        assert valid[1] < valid[0] - 0.01
        clock = time.perf_counter()
        whole = run_locally(Job(config, CORPUS, begin=begin))
        assert 0 < whole.seconds < time.perf_counter() - clock
        file = tmp_path / "file"
        part = replace(config, max_steps=32)  # ends within the second pass
        run_locally(Job(part, CORPUS, keep=file, begin=begin))
        resumed = run_locally(Job(config, CORPUS, checkpoint.load(file)))
        for history in (whole, resumed):
            assert history.losses == pytest.approx(losses, rel=1e-10)
            assert max_difference(history.weights, twin.named()) < 1e-10
            assert history.perplexity == pytest.approx(math.exp(valid[1]), rel=1e-10)
        notes = [note for note in whole.progress if note.valid]
        assert [note.valid.loss for note in notes] == pytest.approx(valid, rel=1e-10)
        assert [(n.epoch, n.step) for n in notes] == [(1, 20), (2, 40)]
        assert whole.tokens == 1390
        assert whole.progress[0].train_loss == pytest.approx(sum(losses[:10]) / 10)

    def test_the_server_s_dropout_is_drawn_there_and_off_while_it_evaluates(self):
        config = replace(self.CONFIG, num_layers=1)  # the LSTM has no dropout then
        twin = rnn_twin.Twin(9, config)
        begin = twin.named()
        how = replace(config, clip=1e9)
        losses, valid = rnn_twin.train(twin, CORPUS, how, stream=1)
        (history,) = run(Job(config, CORPUS, begin=begin))
        assert history.losses == pytest.approx(losses, rel=1e-10)
        notes = [note.valid.loss for note in history.progress if note.valid]
        assert notes == pytest.approx(valid, rel=1e-10)

    @pytest.mark.parametrize("name", ["decoder.decoder.bias", "bias"])
    def test_does_not_begin_with_what_is_no_parameter(self, name):
        job = Job(EXACT, CORPUS, begin={name: torch.zeros(3)})
        with pytest.raises(
            ValueError, match=rf"begin has {name} \(3,\), but .*embedding"
        ):
            check(job)


class TestOptimizer:
    def test_does_not_step_with_a_stale_gradient(self):
        # As torch's DistributedOptimizer does with an optimizer of one's own.
        found = [play(step_owner_twice, attach=attach) for attach in WAYS.values()]
        found.append(step_owner_twice())
        expected = [[0.5, 0.0], [0.5, 0.5]], [2.0, 1.0], 0
        assert found == [expected] * 3

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

    @pytest.mark.parametrize(
        ("clip", "values"), [(None, (-0.5, -1.0)), (2.5, (0.25, 0.0))]
    )
    def test_of_trainers_in_step_clips_their_sum_or_nothing(
        self, clip, values, monkeypatch
    ):
        two = Two()
        kept = {"one": {two.a: torch.tensor(3.0)}, "other": {two.b: torch.tensor(4.0)}}
        monkeypatch.setattr(gradients, "_kept_gradients", kept)
        config = replace(HALF, num_trainers=2, clip=clip)
        owner = Owner({"two": reference(two)}, config)
        for moved in [owner.step_together(*each) for each in enumerate(list(kept))]:
            assert moved.wait() == 0
        assert two.values() == pytest.approx(values, abs=1e-6)


class TestModel:
    def test_each_part_begins_with_a_seed_of_its_own(self):
        plain = []
        layers = (nn.Embedding, 9, 6), (nn.LSTM, 6, 5, 2)
        for number, (kind, *sizes) in enumerate((*layers, (nn.Linear, 5, 9))):
            torch.manual_seed(3 * 2 + number)
            layer = kind(*sizes)
            if kind is not nn.LSTM:
                nn.init.uniform_(layer.weight, -0.1, 0.1)
            plain.append(layer.double())
        nn.init.zeros_(plain[2].bias)
        before = torch.get_rng_state()
        parts = build_all(9, replace(EXACT, seed=2)).parameters()
        assert torch.equal(torch.get_rng_state(), before)  # nothing else was drawn
        expected = [weight for layer in plain for weight in layer.parameters()]
        for found, weight in zip(parts, expected, strict=True):
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


def test_a_trace_shows_the_server_s_part_of_each_backward_pass():
    trace = Trace()
    run(Job(replace(EXACT, max_steps=2), CORPUS), trace=trace)
    passes = [s for s in trace.spans if s.name == "backward"]
    parts = [s for s in trace.spans if s.worker == "ps"]
    assert [s.name for s in parts] == ["decoder backward", "embedding backward"] * 2
    for whole, decoder, table in zip(passes, parts[::2], parts[1::2], strict=True):
        assert whole.started <= decoder.started < table.started
        assert max(decoder.ended, table.ended) <= whole.ended


class TestTrainers:
    def test_asynchronous_ones_are_stale_and_learn(self):
        config = replace(
            EXACT, num_trainers=2, sync=False, dtype="float32", optimizer="adam",
            lr=0.02, max_steps=None,
        )  # fmt: skip
        histories = run(Job(config, CORPUS))
        stale = [s for history in histories for s in history.staleness]
        assert max(stale) >= 1
        assert len(histories[0].losses) == len(histories[1].losses) > 30
        for history in histories:
            assert sum(history.losses[-10:]) < 0.9 * sum(history.losses[:10])

    def test_to_evaluate_keeps_nothing_for_a_backward_pass(self):
        # The caller's no_grad does not reach the server.
        decoder = build("decoder", 9, EXACT)
        output, targets = torch.zeros(7, 5, 5).double(), torch.zeros(7, 5).long()
        for training in (True, False):
            decoder.train(training)
            assert decoder.loss(output, targets).requires_grad == training

    def test_a_step_during_the_forward_pass_makes_stale(self):
        config = replace(EXACT, num_trainers=2, sync=False)
        trainer = Trainer(0, Job(config, CORPUS))
        window = *next(trainer.stream.windows()), trainer.hidden(0)
        assert trainer.step(*window)[1] == 0
        whole = trainer.model.loss

        def loss_while_another_steps(*args):
            found = whole(*args)
            trainer.owners[0].rpc_sync().step(None, 1.0)
            return found

        trainer.model.loss = loss_while_another_steps
        assert [trainer.step(*window)[1] for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("how", CONSTRAINED.values(), ids=CONSTRAINED)
def test_stays_near_the_manifold_and_projects_onto_it(how):
    history = run_locally(Job(replace(NEAR, **how), CORPUS))
    assert max(found.mapped for found in history.feasibility) < 0.05
    assert history.feasibility[-1].weight > 1e-6  # penalised, not exact
    before, after = history.progress[-1].valid, history.projected
    assert after.feasibility.weight < 1e-12
    assert after.score.loss == pytest.approx(before.loss, rel=0.01)


def test_what_the_constraint_means():
    configs = {name: replace(EXACT, **how) for name, how in CONSTRAINED.items()}
    stacked, gates = (build("rnn", 9, configs[n]) for n in ("stacked", "per gate"))
    words = build("embedding", 9, configs["unit word vectors"])
    decoder = build("decoder", 9, configs["Stiefel decoder"]).decoder.weight
    for part in ("embedding", "decoder"):
        with pytest.raises(ValueError, match="no weight"):
            Constraints(build(part, 9, configs["stacked"]))
    eye = torch.eye(5, dtype=torch.float64)
    whole, single = stacked.weight_hh_l1, gates.weight_hh_l1.unflatten(0, (4, 5))
    assert torch.allclose(whole.mT @ whole, eye)
    assert torch.allclose(single.mT @ single, eye.expand(4, 5, 5))
    assert torch.allclose(words.encoder.weight.norm(dim=1), torch.ones(9).double())
    assert torch.allclose(decoder.mT @ decoder, eye)


def test_the_penalty_reaches_the_server():
    # The original's covers the trainer's own model only.
    config, trace = replace(NEAR, **CONSTRAINED["Stiefel decoder"]), Trace()
    (history,) = run(Job(config, CORPUS), trace=trace)
    calls = [call for call in trace.calls if call.method == "penalty_on_cpu"]
    back = [span for span in trace.spans if span.name == "penalty backward"]
    assert len(calls) == len(back) == len(history.losses)
    assert {span.worker for span in back} == {"ps"}
    loose = run_locally(Job(replace(config, penalty_param=1e-12), CORPUS))
    assert history.feasibility[-1].weight < 0.3 * loose.feasibility[-1].weight


@pytest.mark.parametrize("sync", [True, False])
def test_the_penalty_counts_once_for_each_step(sync):
    for rank in (0, 1):
        config = replace(NEAR, manifold="stiefel", num_trainers=2, sync=sync)
        with alone():
            trainer = Trainer(rank, Job(config, CORPUS))
        off = {name: 1.1 * weight for name, weight in trainer.gather("weights").items()}
        trainer.on_owners("load", off, {})
        loss, mean, _ = trainer.loss(*next(trainer.stream.windows()), trainer.hidden(0))
        columns = trainer.stream.batch_size
        own = mean * columns / 5 if sync else mean  # its part of the joint batch
        penalty = 0.0 if sync and rank == 1 else trainer.constraints.penalty().item()
        assert loss.item() - own == pytest.approx(penalty, rel=1e-9, abs=1e-12)
        assert penalty > 0.1 or (sync and rank == 1)
