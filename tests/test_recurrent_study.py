"""Chapter 4's study: how its kinds begin, what they keep, how they are trained."""

from dataclasses import replace

import pytest
import torch

from cdopt_tutorial.data import Grammar
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import Job, RNNConfig, run_locally, study
from cdopt_tutorial.parameter_server.study import KINDS, RNN, STUDY

CORPUS = Grammar(num_words=9, branching=3).corpus(360, 100)  # 9 windows
EXACT = RNNConfig(
    embedding=6, hidden=5, dropout=0.0, seq_len=7, batch_size=6, lr_decay=1.0,
    epochs=2, max_steps=12, dtype="float64",
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small model and text, in float64."""
    monkeypatch.setattr(study, "CONFIG", EXACT)
    monkeypatch.setattr(study, "load_corpus", lambda max_vocab: CORPUS)


def run_of(kind: str, steps: int) -> RNN:
    run = RNN(kind, 0.02, 3, "cpu")
    for _ in range(steps):
        run.step(0.02)
    return run


@pytest.mark.parametrize("kind", [k for k in KINDS if k.startswith(("free", "Sti"))])
def test_a_run_is_the_system_in_one_process(kind):
    config = replace(EXACT, lr=0.02, seed=3, **KINDS[kind][1])
    system = run_locally(Job(config, CORPUS))
    assert len(system.losses) == 12
    weights = run_of(kind, 12).parts.state_dict()
    assert max_difference(system.weights, weights) < 1e-12
    assert (config.constrained is None) == (kind == "free")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_keeps_and_where_it_begins(kind):
    way = KINDS[kind][0]
    run = run_of(kind, 0)
    if way not in ("", "same norm", "spectral norm") and kind[-7:] != "decoder":
        assert run.distance() < 1e-5
    layer, name, blocks = study.treated(kind, run.parts)
    weight = getattr(layer, name).detach().clone()
    for _ in range(9):
        run.step(0.02)
    run.parts.eval()  # or the spectral norm would be estimated anew
    trained = getattr(layer, name).detach()
    assert (trained - weight).norm() > 0.01
    kept = {
        "Stiefel": lambda: run.distance() < 0.1,
        "torch's orthogonal": lambda: run.distance() < 1e-9,
        "projected": lambda: run.distance() < 1e-9,
        "same norm": lambda: abs(trained.norm() - 5**0.5) < 1e-9,
        "spectral norm": lambda: abs(torch.linalg.matrix_norm(trained, 2) - 1) < 0.05,
    }
    assert kept.get(way, lambda: run.distance() > 0.1)()
    assert blocks == (4 if kind.endswith("per gate") else 1)


def test_kinds_begin_alike():
    """A dissolved weight's control begins at what the map makes of it."""
    window = CORPUS.train[:14].view(7, 2)
    for where in ("", ", per gate", ", decoder"):
        runs = [run_of(f"{way}{where}", 0) for way in ("Stiefel", "orthogonal start")]
        scores = [run.model(window, run.model.start(2))[0] for run in runs]
        torch.testing.assert_close(*scores, rtol=0, atol=1e-6)


def test_a_look_reads_both_halves_without_dropout_and_training_has_it(monkeypatch):
    monkeypatch.setattr(study, "CONFIG", replace(EXACT, dropout=0.5))
    run = run_of("free", 0)
    looks = {run.look() for _ in range(2)}
    assert len(looks) == 1 and len(set(*looks)) == 2
    assert all(part.training for part in run.parts.values())
    short = replace(STUDY, steps=9, every=3)
    of = "free", 0.02, "cosine", 2, 1
    assert short.converge(*of)["curve"] == short.converge(*of)["curve"]
