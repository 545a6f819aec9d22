"""The studies: how they tune, keep and train, and that the stored ones are so."""

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import acrobot
import climb
import controls
import copying
import decay
import gymnasium
import numpy as np
import pytest
import torch
import tuning
from hypothesis import given
from hypothesis import strategies as st
from study import Study
from torch import nn, optim

from cdopt_tutorial import study as stored_studies
from cdopt_tutorial.constraints import dissolve

ROOT = Path(__file__).parents[1]
FILES = sorted(ROOT.glob("cdopt_tutorial/**/*.json"))
STORED = [json.loads(file.read_text()) for file in FILES]
RATES = {climb.setting((number, 0))["lr"]: number for number in range(-14, 0)}
NAMES = "kind", "lr", "decay", "warm_up", "seed"


def form(value):
    """Keys and types, those of a list's first element for all."""
    if isinstance(value, dict):
        return {key: form(each) for key, each in value.items()}
    return [form(value[0])] if isinstance(value, list) and value else type(value)


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored["command"])
def test_a_smoke_run_writes_what_the_book_stores(stored, tmp_path):
    out = tmp_path / "out.json"
    command = *stored["command"].split()[1:], "--smoke", "--out", out
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    written = json.loads(out.read_text())
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


def test_a_run_keeps_its_best_and_stops_once_nothing_improves():
    def converge(losses, *how, **options):
        looks, rates = iter([(loss, loss + 1) for loss in losses]), []
        parts = {"step": rates.append, "look": lambda: next(looks)}
        learner = SimpleNamespace(**parts, distance=lambda: 0.5)
        of = Study((), lambda *_: learner, 8, every=2, patience=4)
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


BEGUN = [*product(decay.STUDIES, ("free", "Stiefel"))]
BEGUN += [("parameter_server", "Stiefel, decoder"), ("sharding", "Muon")]


@pytest.mark.parametrize(("chapter", "kind"), BEGUN)
def test_what_is_stored_begins_as_it_does_here(chapter, kind):
    """Up to rounding: machines differed by 5e-6 nats, and two rates by far more."""
    run, *_ = stored_studies.Study(chapter).by_kind()[kind]
    of = decay.STUDIES[chapter]
    again = of.converge(*(run[name] for name in NAMES), of.steps, until=of.every)
    assert again["curve"][0] == pytest.approx(run["curve"][0], abs=0.02)


def test_free_matrices_decay_and_nothing_else():
    model = nn.Sequential(dissolve(nn.Linear(3, 4)), nn.Linear(4, 2))
    optimizer = decay.adamw(model, lr=0.1, weight_decay=0.5)
    decays = {w: g["weight_decay"] for g in optimizer.param_groups for w in g["params"]}
    for name, weight in model.named_parameters():
        assert decays.pop(weight) == (0.5 if name == "1.weight" else 0.0)
    assert not decays


def test_the_chapters_rates_of_memory_are_the_tuned_ones():
    """But for two controls, which lose as much at a third of theirs."""
    stored = stored_studies.stored("dissolving/copying.json")
    losses = {(task, model, lr): of for task, model, lr, *of in stored["tuned"]}
    for task, model, lr in stored["chosen"]:
        used = copying.CONFIGS[task].lr
        means = {at: np.mean(losses[task, model, at]) for at in copying.RATES}
        assert lr == used or means[used] - min(means.values()) < 0.005


def test_acrobots_move_as_gymnasiums_own():
    dice, many = np.random.default_rng(0), acrobot.Acrobots(300)
    many.reset()
    most = np.array([[np.pi], [np.pi], [4 * np.pi], [9 * np.pi]])
    many._state, many._steps = most * dice.uniform(-1, 1, (4, 300)), 498
    before, actions = many._state.T.copy(), dice.integers(3, size=300)
    states, rewards, up, late, _ = many.step(actions)
    one = gymnasium.make("Acrobot-v1")
    for i in range(300):
        one.reset()
        one.unwrapped.state = before[i]
        state, *after, _, _ = one.step(actions[i])
        np.testing.assert_allclose(states[i], state, rtol=0, atol=1e-6)
        assert [rewards[i], up[i]] == after
    assert 0 < up.sum() < 300 and not late.any()
    assert many.step(actions)[3].all()  # the 500th
