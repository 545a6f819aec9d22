"""The copying memory problem against its definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from cdopt_tutorial.dissolving.memory import CopyingMemory

tasks = st.builds(
    CopyingMemory,
    num_symbols=st.integers(2, 9),
    num_copies=st.integers(1, 6),
    delay=st.integers(1, 12),
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(tasks, st.integers(1, 7), st.integers(0, 99))
def test_a_sequence_is_symbols_blanks_a_marker_and_blanks(task, batch_size, seed):
    inputs, targets = task.batch(batch_size, generator(seed))
    shape = (task.delay + 2 * task.num_copies, batch_size)
    assert inputs.shape == targets.shape == shape
    for one, answer in zip(inputs.T.tolist(), targets.T.tolist(), strict=True):
        symbols = one[: task.num_copies]
        assert all(1 <= symbol <= task.num_symbols for symbol in symbols)
        pause = [0] * (task.delay - 1) + [task.num_symbols + 1]
        assert one == symbols + pause + [0] * task.num_copies
        assert answer == [0] * (task.num_copies + task.delay) + symbols


def test_a_batch_depends_on_the_generator_only():
    task = CopyingMemory()
    first, again, other = (task.batch(4, generator(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    one = generator(1)
    assert not torch.equal(task.batch(4, one)[0], task.batch(4, one)[0])


@given(tasks, st.integers(0, 99))
def test_a_perfect_answer_recalls_all_and_costs_nothing(task, seed):
    _, targets = task.batch(3, generator(seed))
    logits = 60.0 * functional.one_hot(targets, task.num_outputs).double()
    assert task.recall(logits, targets) == 1
    assert task.loss(logits, targets).item() < 1e-12


@given(tasks, st.integers(0, 99))
def test_the_best_answer_without_memory_costs_the_chance_loss(task, seed):
    _, targets = task.batch(5, generator(seed))
    log_probabilities = torch.full((task.num_outputs,), -math.inf).double()
    log_probabilities[1:] = -math.log(task.num_symbols)
    logits = log_probabilities.expand(*targets.shape, -1).clone()
    blank = functional.one_hot(torch.tensor(0), task.num_outputs).double()
    logits[: -task.num_copies] = blank.log()
    guesses = task.num_copies * math.log(task.num_symbols)
    assert task.loss(logits, targets).item() == pytest.approx(guesses / len(targets))


def test_recall_counts_only_what_was_to_be_recalled():
    task = CopyingMemory(num_symbols=2, num_copies=2, delay=1)
    _, targets = task.batch(1, generator(0))
    logits = functional.one_hot(targets, 3).float()
    logits[:3] = logits[:3].roll(1, dims=-1)  # all blanks wrong
    assert task.recall(logits, targets) == 1
    logits[-1] = logits[-1].roll(1, dims=-1)
    assert task.recall(logits, targets) == 0.5
