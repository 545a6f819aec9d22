"""The studies: how they tune, keep and train, and that the stored ones are so."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import acrobot
import climb
import controls
import copying
import decay
import gymnasium
import numpy as np
import pytest
import recurrent
import torch
import torch.nn.functional as F
import transformer
import tuning
from hypothesis import given
from hypothesis import strategies as st
from study import Study
from torch import nn, optim

from cdopt_tutorial import study as stored_studies
from cdopt_tutorial.constraints import dissolve
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import Job, RNNConfig, run_locally
from cdopt_tutorial.sharding.system import held_out_loss

ROOT = Path(__file__).parents[1]
FOLDERS = {"recurrent": "parameter_server", "transformer": "sharding"}
STUDIES = {"recurrent": recurrent.STUDY, "transformer": transformer.STUDY}
STORED = {name: f"{folder}/study.json" for name, folder in FOLDERS.items()}
STORED |= {"lag": "rollouts/lag.json", "shapes": "dissolving/shapes.json"}
STORED |= {"certificate": "dissolving/certificate.json", "decay": "decay.json"}
STORED["copying"] = "dissolving/copying.json"
RATES = {climb.setting((number, 0))["lr"]: number for number in range(-14, 0)}
NAMES = "kind", "lr", "decay", "warm_up", "seed"


def form(value):
    """Keys and types, those of a list's first element for all."""
    if isinstance(value, dict):
        return {key: form(each) for key, each in value.items()}
    return [form(value[0])] if isinstance(value, list) and value else type(value)


@pytest.mark.parametrize("name", STORED)
def test_a_smoke_run_writes_what_the_book_stores(name, tmp_path):
    out = tmp_path / "out.json"
    script = f"book/studies/{name}.py", "--smoke", "--out", str(out)
    subprocess.run([sys.executable, *script], cwd=ROOT, check=True)
    written = json.loads(out.read_text())
    assert written["command"] == f"python book/studies/{name}.py"
    if name in STORED:
        stored = json.loads((ROOT / "cdopt_tutorial" / STORED[name]).read_text())
        assert written["command"] == stored["command"]
        for key in stored.keys() - {"clock", "checked", "load"}:  # of other sizes
            assert form(written[key]) == form(stored[key]), key
        assert written.keys() >= stored.keys()


@given(
    best=st.lists(st.integers(-12, -3), min_size=2, max_size=2),
    how=st.sampled_from(tuning.SCHEDULES),
)
def test_a_kind_is_tuned_to_its_best_rate_and_schedule_wherever_they_are(best, how):
    ran = []

    def train(chosen, seeds):
        ran.extend(chosen)
        return {of: [{"tuning": loss(of)} for _ in seeds] for of in chosen}

    def loss(of):
        kind, lr, *schedule = of
        return abs(RATES[lr] - best[int(kind)]) + (tuple(schedule) != how)

    found = tuning.tune(train, ("0", "1"), (7, 8))
    assert [kind for kind, *_ in found] == ["0", "1"]
    assert [RATES[lr] for _, lr, *_ in found] == best
    assert {tuple(schedule) for _, _, *schedule in found} == {how}
    assert len(ran) == len(set(ran))


class Scripted:
    """A learner with losses by the script, which notes the rates of its steps."""

    def __init__(self, losses, rates):
        self.losses, self.rates = iter(losses), rates

    def step(self, lr):
        self.rates.append(lr)

    def look(self):
        loss = next(self.losses)
        return loss, loss + 1

    def distance(self):
        return 0.5


def test_a_run_keeps_its_best_and_stops_once_nothing_improves():
    def converge(losses, *how, **options):
        rates = []
        of = Study((), lambda *_: Scripted(losses, rates), 8, every=2, patience=4)
        return of.converge("", 0.1, *how, 1, 8, **options), rates

    found, rates = converge([3, 2, 4, 1], "cosine", 2)
    assert (found["tuning"], found["test"], found["steps"]) == (1, 2, 8)
    falls = [0.05 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates == pytest.approx([falls[0] / 2, *falls[1:]])
    cut, rates = converge([3, 2, 4, 1], "none", 0, until=4)
    assert cut["curve"] == [(3, 4, 2), (2, 3, 4)] and rates == [0.1] * 4
    assert converge([3, 2, 4, 5], "none", 0)[0]["last"] == 8
    assert converge([2, 3, 4, 1], "none", 0)[0]["last"] == 6
    assert converge([math.nan], "none", 0)[0]["last"] == 2


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("way", controls.CONTROLS)
def test_a_control_keeps_what_it_is_named_for(way, blocks):
    layer = nn.Linear(6, 12).double()
    x, y = torch.randn(9, 6).double(), torch.randn(9, 12).double()
    after_step = controls.treat(way, layer, blocks=blocks)
    start = layer.weight.detach().clone()
    optimizer = optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(20):
        optimizer.zero_grad()
        (layer(x) - y).square().mean().backward()
        optimizer.step()
        after_step()
    layer.eval()  # or the spectral norm would be estimated anew

    def off(weight):
        grams = [b @ b.T if 12 / blocks < 6 else b.T @ b for b in weight.chunk(blocks)]
        return max((gram - torch.eye(len(gram))).norm().item() for gram in grams)

    weight = layer.weight.detach()
    assert (weight - start).norm() > 0.01
    if way == "same norm":
        sizes = [block.norm().item() for block in weight.chunk(blocks)]
        assert sizes == pytest.approx([min(12 / blocks, 6) ** 0.5] * blocks)
    elif way == "spectral norm":
        assert torch.linalg.matrix_norm(weight, 2) == pytest.approx(1, abs=0.05)
    else:
        assert off(start) < 1e-9
        assert off(weight) > 0.01 if way == "orthogonal start" else off(weight) < 1e-9


@pytest.mark.parametrize("kind", ["free", "Stiefel", "Stiefel, decoder"])
def test_a_run_of_the_rnn_is_the_system_in_one_process(kind, monkeypatch):
    corpus = Grammar(num_words=9, branching=3).corpus(360, 100)  # 9 windows
    exact = RNNConfig(
        embedding=6, hidden=5, dropout=0.0, seq_len=7, batch_size=6, lr_decay=1.0,
        epochs=2, max_steps=12, dtype="float64",
    )  # fmt: skip
    monkeypatch.setattr(recurrent, "CONFIG", exact)
    monkeypatch.setattr(recurrent, "load_corpus", lambda max_vocab: corpus)
    config = replace(exact, lr=0.02, seed=3, **recurrent.KINDS[kind][1])
    system = run_locally(Job(config, corpus))
    run = recurrent.RNN(kind, 0.02, 3, "cpu")
    for _ in range(12):
        run.step(0.02)
    assert max_difference(system.weights, run.parts.state_dict()) < 1e-12


def test_a_run_of_the_transformer_is_the_loop_written_out():
    run = transformer.Transformer("Muon", 1e-2, 1, "cpu")
    corpus = run.trainer.job.corpus
    model, _ = transformer.make("Muon", run.config, len(corpus.vocabulary))
    muon, adam = [], []
    for name, value in model.named_parameters():
        (muon if "block" in name and value.ndim == 2 else adam).append(value)
    assert len(muon) == 12
    how = {"weight_decay": 0, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = optim.Adam(adam, 1e-2), optim.Muon(muon, 1e-2, **how)
    rows = (len(corpus.train) - 1) // 16
    for step in range(6):
        run.step(1e-2)
        begins = [rows * column + 16 * step for column in range(16)]
        words = torch.stack([corpus.train[at : at + 17] for at in begins])
        scores = model(words[:, :-1])
        loss = F.cross_entropy(scores.transpose(1, 2), words[:, 1:])
        model.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
    losses = [held_out_loss(model, half, 16) for half in corpus.valid.chunk(2)]
    assert run.look() == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("kind", ["free", "Stiefel"])
def test_what_is_stored_begins_as_it_does_here(name, kind):
    """Up to rounding: machines differed by 5e-6 nats, and two rates by far more."""
    run, *_ = stored_studies.Study(FOLDERS[name]).by_kind()[kind]
    of, setting = STUDIES[name], [run[name] for name in NAMES]
    again = of.converge(*setting, of.steps, until=of.every)
    assert again["curve"][0] == pytest.approx(run["curve"][0], abs=0.02)


def test_weight_decay_shrinks_free_matrices_and_nothing_else():
    model = nn.Sequential(dissolve(nn.Linear(3, 4)), nn.Linear(4, 2))
    optimizer = decay.adamw(model, lr=0.1, weight_decay=0.5)
    before = {name: w.detach().clone() for name, w in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    left = {name: w / before[name] for name, w in model.named_parameters()}
    for name, share in left.items():
        expected = 0.95 if name == "1.weight" else 1.0
        torch.testing.assert_close(share, torch.full_like(share, expected))


@pytest.mark.parametrize("name", decay.NAMES)
def test_no_rate_or_decay_beside_the_stored_ones_is_better(name):
    stored, losses = stored_studies.stored("decay.json"), {}
    for run in stored["tuned"]:
        if run["name"] == name:
            at = run["lr"], run["weight_decay"]
            losses.setdefault(at, []).append(run["tuning"])
    means = {at: sum(of) / len(of) for at, of in losses.items()}
    lr, weight_decay = min(means, key=means.get)
    rates = decay.RATES[(at := decay.RATES.index(lr)) - 1 : at + 2]
    decays = weight_decay / 4, weight_decay, weight_decay * 4
    assert len(rates) == 3 and means.keys() >= set(product(rates, decays))
    runs = [run for run in stored["runs"] if run["name"] == name]
    assert {run["seed"] for run in runs} == {1, 2, 3, 4, 5}
    assert {(run["lr"], run["weight_decay"]) for run in runs} == {(lr, weight_decay)}


def test_the_chapters_rates_of_memory_are_the_tuned_ones():
    """But for two controls, which lose as much at a third of theirs."""
    stored = stored_studies.stored("dissolving/copying.json")
    losses = {(task, model, lr): of for task, model, lr, *of in stored["tuned"]}
    for task, model, lr in stored["chosen"]:
        used = copying.CONFIGS[task].lr
        means = {at: np.mean(losses[task, model, at]) for at in copying.RATES}
        assert lr == min(means, key=means.get)
        assert lr == used or means[used] - means[lr] < 0.005
    assert len(losses) == len(copying.RATES) * len(stored["chosen"]) == 7 * 14


def test_acrobots_move_as_gymnasiums_own():
    dice, many = np.random.default_rng(0), acrobot.Acrobots(5)
    many.np_random = np.random.default_rng(1)
    states, _ = many.reset()
    each = [gymnasium.make("Acrobot-v1") for _ in range(5)]
    for one, state in zip(each, many._state.T, strict=True):
        one.reset()
        one.unwrapped.state = state.copy()
    up = late = np.zeros(5, bool)
    while not (up.all() or late.any()):
        # With the lower link's own motion it swings up soon.
        actions = np.where(states[:, 5] > 0, 2, 0)
        actions[dice.random(5) < 0.1] = 1
        states, rewards, over, late, _ = many.step(actions)
        for i in np.flatnonzero(~up):
            state, reward, done, truncated, _ = each[i].step(actions[i])
            np.testing.assert_allclose(states[i], state, rtol=0, atol=1e-6)
            assert (rewards[i], over[i], late[i]) == (reward, done, truncated)
            each[i].unwrapped.state = many._state[:, i].copy()  # chaos: start level
        up = up | over
    assert up.any()
