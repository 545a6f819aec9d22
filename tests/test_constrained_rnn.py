"""Chapter 4: chapter 2's promises hold for constrained weights, wherever they are."""

from dataclasses import replace

import pytest
import torch
from roles import WAYS

from cdopt_tutorial.calls import alone
from cdopt_tutorial.constraints import Constraints
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import (
    Job,
    RNNConfig,
    Trainer,
    run,
    run_locally,
)
from cdopt_tutorial.parameter_server.model import build, build_all
from cdopt_tutorial.run import Trace

EXACT = RNNConfig(
    embedding=6, hidden=5, num_layers=2, dropout=0.0, seq_len=7, batch_size=6,
    optimizer="sgd", lr=0.1, momentum=0.9, clip=1.0, epochs=3, max_steps=50,
    dtype="float64", manifold="stiefel", penalty_param=0.5,
)  # fmt: skip
GRAMMAR = Grammar(num_words=9, branching=3)
CORPUS = GRAMMAR.corpus(900, 200)
SHORT = GRAMMAR.corpus(360, 50)  # of 9 windows
CONSTRAINED = {
    "stacked": {},
    "per gate": {"per_gate": True},
    "oblique LSTM": {"manifold": "oblique"},
    "Stiefel decoder": {"where": "server"},
    "unit word vectors": {"manifold": "oblique", "where": "server"},
}


@pytest.mark.parametrize("way", WAYS)
def test_equals_one_process(way):
    for name, how in CONSTRAINED.items():
        number = 1 if name in ("per gate", "oblique LSTM") else 3
        # A pass and a part of the next.
        config = replace(EXACT, max_steps=11, num_trainers=number, **how)
        job = Job(config, SHORT)
        distributed, *_ = run(job, attach=WAYS[way])
        local, start = run_locally(job), build_all(9, config).state_dict()
        free = replace(config, manifold="none", per_gate=False)
        assert len(local.losses) == len(distributed.feasibility) == 11
        assert max_difference(local.weights, start) > 0.01  # they moved
        assert local.losses[-1] != run_locally(Job(free, SHORT)).losses[-1]
        assert max_difference(distributed.weights, local.weights) <= 5e-11, job
        one, other = distributed.feasibility[-1], local.feasibility[-1]
        assert one.weight == pytest.approx(other.weight, rel=1e-8)
        assert one.mapped == pytest.approx(other.mapped, rel=1e-6)


@pytest.mark.parametrize("how", CONSTRAINED.values(), ids=CONSTRAINED)
def test_stays_near_the_manifold_and_projects_onto_it(how):
    history = run_locally(Job(replace(EXACT, **how), CORPUS))
    assert max(found.mapped for found in history.feasibility) < 0.05
    assert history.feasibility[-1].weight > 1e-6  # penalised, not exact
    before, after = history.progress[-1].valid, history.projected
    assert after.feasibility.weight < 1e-12
    assert after.score.loss == pytest.approx(before.loss, rel=0.01)


def test_what_the_constraint_means():
    stacked = build("rnn", 9, EXACT)
    gates = build("rnn", 9, replace(EXACT, per_gate=True))
    words = build("embedding", 9, replace(EXACT, manifold="oblique", where="server"))
    decoder = build("decoder", 9, replace(EXACT, where="server")).decoder.weight
    for part in ("embedding", "decoder"):
        with pytest.raises(ValueError, match="no weight"):
            Constraints(build(part, 9, EXACT))
    eye = torch.eye(5, dtype=torch.float64)
    whole, single = stacked.weight_hh_l1, gates.weight_hh_l1.unflatten(0, (4, 5))
    assert torch.allclose(whole.mT @ whole, eye)
    assert torch.allclose(single.mT @ single, eye.expand(4, 5, 5))
    assert torch.allclose(words.encoder.weight.norm(dim=1), torch.ones(9).double())
    assert torch.allclose(decoder.mT @ decoder, eye)


def test_the_penalty_reaches_the_server():
    # The original's covers the trainer's own model only.
    config = replace(EXACT, where="server", clip=None)
    trace = Trace()
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
        config = replace(EXACT, num_trainers=2, sync=sync)
        with alone():
            trainer = Trainer(rank, Job(config, CORPUS))
        off = {name: 1.1 * weight for name, weight in trainer.gather("weights").items()}
        trainer.on_owners("load", off, {})
        loss, mean, _ = trainer.loss(*next(trainer.stream.windows()), trainer.hidden(0))
        own = mean / 2 if sync else mean  # half of the joint batch
        penalty = 0.0 if sync and rank == 1 else trainer.constraints.penalty().item()
        assert loss.item() - own == pytest.approx(penalty, rel=1e-9, abs=1e-12)
        assert penalty > 0.1 or (sync and rank == 1)
