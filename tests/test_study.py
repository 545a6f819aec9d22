"""The study of chapter 6: what its kinds constrain, start from, and are trained by."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from cdopt_tutorial import constraints
from cdopt_tutorial.data import load_corpus
from cdopt_tutorial.sharding import study
from cdopt_tutorial.sharding.model import MAX_VOCAB, Job
from cdopt_tutorial.sharding.study import CONFIG, KINDS, STUDY, make
from cdopt_tutorial.sharding.system import held_out_loss

pytestmark = pytest.mark.xdist_group("study")

EXACT = "Stiefel", "torch's orthogonal", "projected"
ALIKE = ("orthogonal start", "Stiefel", "torch's orthogonal")
VOCAB = 50
STEPS, EVERY = 12, 4
SHORT = replace(STUDY, steps=STEPS, every=EVERY)
CORPUS = load_corpus(max_vocab=MAX_VOCAB)
CORPUS = replace(CORPUS, valid=CORPUS.valid[:2_000])


def made(kind: str, seed: int = 1) -> nn.Sequential:
    return make(kind, replace(CONFIG, seed=seed), VOCAB)[0]


def off(rows: torch.Tensor) -> float:
    """‖WWᵀ - I‖ of a matrix with orthonormal rows."""
    return (rows @ rows.T - torch.eye(len(rows))).norm().item()


def offs(model: nn.Sequential) -> list[float]:
    """The same for each head's rows of q, k and v, and for each out."""
    found = []
    for block in (model.block0, model.block1):
        attention = block.attention
        for layer in (attention.q, attention.k, attention.v):
            found += [off(head) for head in layer.weight.chunk(CONFIG.num_heads)]
        found.append(off(attention.out.weight))
    return found


@pytest.fixture(autouse=True, scope="module")
def short():
    """Little text is held out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "Job", lambda config: Job(config, CORPUS))
        yield


@pytest.fixture(scope="module")
def runs(short):
    """A short run of each kind, at one rate."""
    return {kind: SHORT.converge(kind, 1e-2, "none", 0, 1) for kind in KINDS}


@pytest.mark.parametrize("kind", ALIKE)
def test_attentions_start_orthonormal_and_are_the_same(kind):
    model, other = made(kind), made("orthogonal start")
    assert max(offs(model)) < 1e-5
    for number in range(2):
        for name in ("q", "k", "v", "out"):
            both = (each[number + 1].attention for each in (model, other))
            one, two = (getattr(attention, name).weight for attention in both)
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    assert min(offs(made("free"))) > 0.5


def test_all_kinds_of_a_seed_have_the_same_weights_elsewhere():
    free = dict(made("free").named_parameters())
    for kind in KINDS:
        given = dict(made(kind).named_parameters())
        treated = ("attention", "up", "down") if "MLP" in kind else ("attention",)
        for name, value in free.items():
            if not any(part in name.split(".") for part in treated):
                assert torch.equal(given[name], value), (kind, name)
    other = dict(made("free", seed=2).named_parameters())
    assert not torch.equal(other["scores.words.weight"], free["scores.words.weight"])


def test_all_learn_and_constraints_last_but_a_start_alone_does_not(runs):
    for kind, run in runs.items():
        loss, _, step = run["curve"][-1]
        assert step == STEPS and loss < math.log(len(CORPUS.vocabulary)) - 0.5, kind
        assert run["step_seconds"] > 0
        exact = KINDS[kind][0] in EXACT
        assert run["distance"] < 0.05 if exact else run["distance"] > 1, kind
    assert runs["torch's orthogonal"]["distance"] < 1e-4


def test_the_distance_is_that_of_every_block():
    for kind in KINDS:
        run = study.Transformer(kind, 1e-2, 1, "cpu")
        run.model.eval()  # or its spectral norm would be estimated anew
        for parameter in run.model.parameters():
            parameter.data += 0.01
        expected = math.hypot(*offs(run.model))
        assert run.distance() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_what_is_only_bounded_has_the_norm_of_an_orthonormal_weight():
    model = made("same norm, MLP too")
    for rows, norm in (
        (model.block0.attention.q.weight[:16], 4),
        (model.block1.up.weight, 8),
    ):
        assert rows.norm().item() == pytest.approx(norm, rel=1e-5)
    model = made("spectral norm, MLP too").eval()
    for layer in (model.block0.attention.out, model.block1.down):
        norm = torch.linalg.matrix_norm(layer.weight, 2).item()
        assert norm == pytest.approx(1, 0.05)


@pytest.mark.parametrize(("kind", "num"), [("Stiefel", 8), ("Stiefel, MLP too", 12)])
def test_the_mlp_is_constrained_only_where_the_kind_says_so(kind, num):
    layers = constraints.feasibility(made(kind)).layers
    assert len(layers) == num
    assert any("up" in name for name in layers) == ("MLP" in kind)
    assert max(each.weight for each in layers.values()) < 1e-5


def test_training_repeats_by_its_seed_and_leaves_the_random_state_alone(runs):
    state, kind = torch.get_rng_state(), "torch's orthogonal"  # which draws, too
    of = kind, 1e-2, "none", 0
    first = runs[kind]["curve"][:1]
    assert SHORT.converge(*of, 1, until=EVERY)["curve"] == first
    assert torch.equal(torch.get_rng_state(), state)
    assert SHORT.converge(*of, 2, until=EVERY)["curve"] != first


def test_a_run_is_the_loop_written_out(runs):
    model, _ = make("Muon", CONFIG, len(CORPUS.vocabulary))
    muon, adam = [], []
    for name, value in model.named_parameters():
        (muon if "block" in name and value.ndim == 2 else adam).append(value)
    assert len(muon) == 12
    how = {"weight_decay": 0, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = optim.Adam(adam, 1e-2), optim.Muon(muon, 1e-2, **how)
    rows = (len(CORPUS.train) - 1) // 16
    for step in range(STEPS):
        begins = [rows * column + 16 * step for column in range(16)]
        words = torch.stack([CORPUS.train[at : at + 17] for at in begins])
        scores = model(words[:, :-1])
        loss = F.cross_entropy(scores.transpose(1, 2), words[:, 1:])
        model.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
    losses = [held_out_loss(model, half, 16) for half in CORPUS.valid.chunk(2)]
    assert runs["Muon"]["curve"][-1][:2] == pytest.approx(losses, rel=1e-4)


def test_a_run_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="kind is 'hope', but must be free or Muon"):
        STUDY.converge("hope", 1e-2, "none", 0, 1)
    with pytest.raises(ValueError, match="lr is 0.0, but must be above 0"):
        STUDY.converge("free", 0.0, "none", 0, 1)


def test_a_run_to_the_end_keeps_its_best_and_falls_to_its_schedule():
    found = SHORT.converge("Stiefel", 1e-2, "cosine", 4, 1, 16)
    tuning = [row[0] for row in found["curve"]]
    assert found["tuning"] == min(tuning) and found["last"] == 16
    best = found["curve"][tuning.index(min(tuning))]
    assert (found["test"], found["steps"]) == best[1:] and found["distance"] < 0.1
    # A stopped run has the whole run's rates until then; a shorter one's fall sooner.
    short, stopped = (
        SHORT.converge("Stiefel", 1e-2, "cosine", 4, 1, *how)
        for how in ((8,), (16, "cpu", 8))
    )
    assert stopped["curve"] == found["curve"][:2] != short["curve"]
    # Far too high a rate soon does only harm, which ends the run.
    impatient = replace(SHORT, patience=8)
    assert impatient.converge("free", 0.5, "none", 0, 1, 400)["last"] < 400
