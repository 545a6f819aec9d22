"""The gradient's way through time, and the comparison of recurrent models."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from cdopt_tutorial import constraints
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.dissolving import memory
from cdopt_tutorial.dissolving.memory import (
    MODELS,
    CopyingMemory,
    MemoryConfig,
    Model,
    NextWord,
    run,
    train,
)

TASK = CopyingMemory(num_symbols=3, num_copies=2, delay=4)
TINY = MemoryConfig(task=TASK, lr=0.02, hidden=8, batch_size=4, steps=50)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", memory.LAYERS)
def test_gradient_norms_are_those_of_the_rest_of_the_sequence(name):
    """By one pass of torch's for each step, which begins with the state there."""
    rnn = memory.LAYERS[name](memory.NUM_INPUTS, 4).double()
    inputs = torch.randn(5, memory.NUM_INPUTS, dtype=torch.float64)
    direction = torch.randn(4, dtype=torch.float64)
    found = memory.gradient_norms(rnn, inputs, direction)
    assert len(found) == 6
    for t in range(1, 5):
        _, state = rnn(inputs[:t])
        is_lstm = isinstance(state, tuple)
        leaves = [s.detach().requires_grad_() for s in (state if is_lstm else [state])]
        outputs, _ = rnn(inputs[t:], tuple(leaves) if is_lstm else leaves[0])
        grads = torch.autograd.grad(outputs[-1] @ direction, leaves)
        assert found[t] == pytest.approx(torch.cat(grads).norm().item(), rel=1e-12)


def test_the_gradients_of_a_seed_repeat_and_begin_with_a_unit_vector():
    found = memory.flows((1, 2), hidden=8)
    torch.manual_seed(9)  # of no use to them
    again = memory.flows((2,), hidden=8)
    assert again == {name: runs[1:] for name, runs in found.items()}
    assert all(norms[-1] == pytest.approx(1) for of in found.values() for norms in of)


def made(name: str, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(name, *TASK.sizes, 8)


def test_all_models_start_with_the_same_readout_and_orthogonal_ones_alike():
    models = {name: made(name) for name in MODELS}
    inputs, _ = TASK.batch(3, generator(0))
    start = models["orthogonal start"](inputs)
    for name, model in models.items():
        assert torch.equal(model.readout.weight, models["free"].readout.weight)
        assert torch.allclose(model(inputs), start, atol=1e-5) == (name != "free")
    with pytest.raises(ValueError, match="model is 'GRU', but must be one of free, "):
        made("GRU")


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_the_loop_written_out(name):
    """In float32, by the same operations: the figures are the same numbers."""
    streams = (np.random.SeedSequence([7, stream]) for stream in (0, 1))
    start, batches = (int(stream.generate_state(1)[0]) for stream in streams)
    model, drawn = made(name, start), generator(batches)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.02, alpha=0.9)
    losses, recalls = [], []
    for _ in range(50):
        inputs, targets = TASK.batch(4, drawn)
        logits = model(inputs)
        recalls.append((logits[-2:].argmax(-1) == targets[-2:]).double().mean().item())
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        if name == "Stiefel":
            loss = loss + constraints.penalty(model.rnn)
        if name == "penalty alone":
            w = model.rnn.weight_hh_l0
            loss = loss + 0.1 * (w.T @ w - torch.eye(8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    state = torch.get_rng_state()
    run, w = train(name, 7, TINY), model.rnn.weight_hh_l0.detach()
    assert torch.equal(torch.get_rng_state(), state) and run.steps == [25, 50]
    assert run.losses == pytest.approx(np.reshape(losses, (2, 25)).mean(1), rel=1e-5)
    assert run.recalls == pytest.approx(np.reshape(recalls, (2, 25)).mean(1), rel=1e-5)
    assert run.mapped == pytest.approx((w.T @ w - torch.eye(8)).norm().item(), rel=1e-4)


def test_a_comparison_has_each_models_runs_in_the_order_of_the_seeds():
    config = replace(TINY, models=("Stiefel", "free"), seeds=(5, 3))
    done = []
    found = run(config, lambda number, one: done.append(number))
    assert list(found) == ["Stiefel", "free"] and done == [1, 2, 3, 4]
    for name, runs in found.items():
        assert runs == [train(name, seed, config) for seed in (5, 3)]


@given(st.integers(2, 9), st.integers(1, 6), st.integers(1, 12), st.integers(1, 7))
def test_a_sequence_is_symbols_blanks_a_marker_and_blanks(kinds, copies, delay, size):
    inputs, targets = CopyingMemory(kinds, copies, delay).batch(size, generator(0))
    assert inputs.shape == targets.shape == (delay + 2 * copies, size)
    for one, answer in zip(inputs.T.tolist(), targets.T.tolist(), strict=True):
        symbols = one[:copies]
        assert all(1 <= symbol <= kinds for symbol in symbols)
        assert one == symbols + [0] * (delay - 1) + [kinds + 1] + [0] * copies
        assert answer == [0] * (copies + delay) + symbols


def test_next_word_batches_are_pieces_of_the_language():
    grammar = Grammar(num_words=5, branching=2, order=2)
    inputs, targets = NextWord(grammar, seq_len=6, text_len=200).batch(50, generator(1))
    assert inputs.shape == targets.shape == (6, 50)
    assert torch.equal(inputs[2:], targets[1:-1]) and (targets[0] == -100).all()
    for words in torch.cat([inputs, targets[-1:]]).T:
        for word, following in itertools.pairwise(words):
            assert following in grammar.successors[word]
