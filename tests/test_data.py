"""Texts, streams, the grammar of known entropy, and the baselines."""

import itertools
import math
import os
import pickle
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdopt_tutorial.data import (
    Corpus,
    Grammar,
    Stream,
    Vocabulary,
    load_corpus,
    ngram_perplexity,
    perplexity,
    text,
)
from cdopt_tutorial.data.baselines import _discounts, probabilities, sequences
from cdopt_tutorial.data.text import UNKNOWN, documentation, tokenize

# Text


def test_docstrings_are_joined_without_repetitions_and_ruled_lines(
    monkeypatch, tmp_path
):
    (tmp_path / "b").mkdir()
    two = 'class B:\n    """Two\n    ***\n\n    Same  here."""'
    (tmp_path / "b" / "b.py").write_text(two)
    (tmp_path / "a.py").write_text(
        '"""One\n+---+\n\nSame\nhere.\n\n===="""\nx = """none"""\n'
        'async def f():\n    "Three."\n    "Four, which is none"\n'
    )
    spec = SimpleNamespace(origin=tmp_path / "a.py")
    monkeypatch.setattr(text, "find_spec", lambda _: spec)
    assert documentation.__wrapped__() == "One\n\nSame here.\n\nThree.\n\nTwo\n"


def test_what_is_no_text_is_refused_in_one_line(tmp_path):
    odd = {
        "empty": (b"", "it has 0 tokens"),
        "latin": (b"text \xff", "its byte 5 is not UTF-8"),
        "short": (b"a b " * 499 + b"c", "it has 999 tokens .* at least 1000"),
        "new": (b"%d " * 999 % (*range(999),) + b".", "no word to learn occurs twice"),
    }
    for name, (data, _) in odd.items():
        (tmp_path / name).write_bytes(data)
    refused = {tmp_path / name: why for name, (_, why) in odd.items()} | {
        tmp_path / "go\nne": "it cannot be read .No such file",
        tmp_path: "it cannot be read .Is a directory",
        tmp_path / "pipe": "it is a pipe",
    }
    os.mkfifo(tmp_path / "pipe")  # which nobody opens for writing
    for path, why in refused.items():
        with pytest.raises(ValueError, match=why) as caught:
            load_corpus(path)
        assert "\n" not in str(caught.value)


def test_tokens_are_lower_cased_words_and_single_marks():
    assert tokenize('A "Foo.__bar__"\tis 3.5,\n\nnot ÉTÉ!?') == [
        *("a", '"', "foo", ".", "__bar__", '"', "is", "3", ".", "5", ","),
        *("not", "été", "!", "?"),
    ]


# Corpus


def test_the_end_of_a_file_is_held_out_and_adds_nothing_to_the_vocabulary(tmp_path):
    words = [f"w{i % 90:02}" for i in range(899)] + ["w01"] + ["new", "w00"] * 50
    # A byte order mark is no part of the text.
    (tmp_path / "text").write_text(" ".join(words), "utf-8-sig")
    corpus = load_corpus(tmp_path / "text")
    assert corpus.vocabulary.decode(corpus.train) == words[:900]
    assert corpus.vocabulary.decode(corpus.valid) == ["<unk>", "w00"] * 50
    small = load_corpus(tmp_path / "text", max_vocab=3)  # the most frequent words
    assert small.vocabulary.words == ("<unk>", "w01", "w00")
    with pytest.raises(ValueError, match="no word to learn"):
        load_corpus(tmp_path / "text", max_vocab=1)
    with pytest.raises(KeyError, match=UNKNOWN):  # not the number of another word
        Vocabulary(("a", "b")).encode(["a", "z"])


def test_of_ten_blocks_of_the_reference_the_fifth_is_held_out(monkeypatch):
    blocks = [f"block{i:03} " * text.BLOCK_TOKENS for i in range(100)]
    monkeypatch.setattr(text, "documentation", lambda: "\n\n".join(blocks))
    corpus = load_corpus()
    learned = {int(word[5:]) for word in corpus.vocabulary.words[1:]}
    assert set(range(100)) - learned == set(range(4, 100, 10))
    assert corpus.valid.tolist() == [0] * text.BLOCK_TOKENS * 10


# Stream


@st.composite
def streams(draw) -> tuple[Tensor, Stream]:
    """A text of distinct tokens, and a stream of it."""
    seq_len, batch_size = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    tokens = torch.arange(draw(st.integers(batch_size + 1, 120))) + 1_000
    return tokens, Stream(tokens, seq_len, batch_size)


@given(streams(), st.data())
def test_a_column_is_a_part_of_the_text_in_order_and_targets_are_the_next(drawn, data):
    tokens, stream = drawn
    windows = list(stream.windows())
    assert {len(inputs) for inputs, _ in windows[:-1]} <= {stream.seq_len}
    assert 1 <= len(windows[-1][0]) <= stream.seq_len
    inputs, targets = (torch.cat(part) for part in zip(*windows, strict=True))
    rows = len(inputs)
    for column in range(stream.batch_size):
        part = tokens[column * rows :]
        assert inputs[:, column].tolist() == part[:rows].tolist()
        assert targets[:, column].tolist() == part[1 : rows + 1].tolist()
    assert inputs.numel() == stream.num_tokens
    assert 0 <= len(tokens) - 1 - stream.num_tokens < stream.batch_size
    start = data.draw(st.integers(0, len(stream)))
    tail = list(stream.windows(start=start))
    for one, other in zip(windows[start:], tail, strict=True):
        assert all(map(torch.equal, one, other))


@given(streams(), st.data())
def test_shards_are_disjoint_columns_that_make_up_the_batch(drawn, data):
    _, stream = drawn
    num_trainers = data.draw(st.integers(1, stream.batch_size))
    shards = [stream.shard(rank, num_trainers) for rank in range(num_trainers)]
    sizes = [shard.batch_size for shard in shards]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert {len(shard) for shard in shards} == {len(stream)}
    for whole, *parts in zip(
        stream.windows(), *(shard.windows() for shard in shards), strict=True
    ):
        for tensor, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(tensor, torch.cat(pieces, dim=1))


def test_a_shard_carries_only_its_columns_when_it_travels():
    stream = Stream(torch.arange(10_001), seq_len=35, batch_size=10)
    assert len(pickle.dumps(stream.shard(3, 10))) < len(pickle.dumps(stream)) / 5


# Grammar


@st.composite
def grammars(draw) -> Grammar:
    """Any small grammar."""
    num_words = draw(st.integers(2, 7))
    branching = draw(st.integers(2, min(num_words, 4)))
    seed, order = draw(st.integers(0, 10**6)), draw(st.integers(1, 3))
    return Grammar(num_words, branching, seed, order)


WORDS = Vocabulary(tuple(map(str, range(1000))))
NINE = Corpus(WORDS, torch.arange(9), torch.arange(9))
REFUSED = [
    (lambda: Grammar(num_words=1, branching=1), "num_words is 1, but must be at least"),
    (lambda: Grammar(num_words=3), "branching is 4, but must be 2 to num_words, 3"),
    (lambda: Grammar(order=0), "order is 0, but must be at least 1"),
    *((partial(ngram_perplexity, NINE, order),
       f"order is {order}, but must be from 1") for order in (0, 7)),
    *((partial(Stream, torch.arange(length), *cut), "but")
      for length, *cut in [(9, 0, 1), (9, 1, 0), (9, 1, 9), (0, 1, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "line"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(make, line):
    with pytest.raises(ValueError, match=line) as caught:
        make()
    assert "\n" not in str(caught.value)


def joint_of(grammar: Grammar) -> dict[tuple[int, ...], float]:
    """Probabilities of ``order`` + 1 successive words, as the docstring says."""
    joint, number, choices = {}, 0, range(grammar.branching)
    for first in range(grammar.num_words):
        for chosen in itertools.product(choices, repeat=grammar.order - 1):
            walk = [first]
            for choice in chosen:
                walk.append(int(grammar.successors[walk[-1], choice]))
            masses = grammar.stationary[number] * grammar.probabilities[number]
            words = grammar.successors[walk[-1]].tolist()
            for word, mass in zip(words, masses.tolist(), strict=True):
                joint[*walk, word] = mass
            number += 1
    return joint


def conditional_entropy(joint: dict[tuple[int, ...], float], order: int) -> float:
    """Of the last word, given the ``order`` words before it."""
    pairs, seen = Counter(), Counter()
    for words, mass in joint.items():
        pairs[words[-order - 1 :]] += mass
        seen[words[-order - 1 : -1]] += mass
    return -sum(mass * math.log(mass / seen[pair[:-1]]) for pair, mass in pairs.items())


@given(grammars())
def test_a_step_leaves_contexts_as_they_are_and_has_the_entropy_rate(grammar):
    joint, before, after = joint_of(grammar), Counter(), Counter()
    for words, mass in joint.items():
        before[words[:-1]] += mass
        after[words[1:]] += mass
    assert before == pytest.approx(after, abs=1e-12)
    expected = conditional_entropy(joint, grammar.order)
    assert grammar.entropy_rate == pytest.approx(expected, abs=1e-9)


@given(grammars())
def test_every_choice_is_another_word_and_no_context_is_left_out(grammar):
    follows = np.zeros((grammar.num_words,) * 2)
    np.put_along_axis(follows, grammar.successors, 1 / grammar.branching, axis=1)
    # Ergodic: one power is positive (Wielandt 1950).
    steps = (grammar.num_words - 1) ** 2 + 1
    assert np.linalg.matrix_power(follows, steps).min() > 0
    assert all(len(set(row)) == grammar.branching for row in grammar.successors)
    np.testing.assert_allclose(grammar.probabilities.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(grammar.stationary.sum(), 1, atol=1e-12)
    assert min(grammar.probabilities.min(), grammar.stationary.min()) > 0


def test_the_first_context_of_a_sample_is_stationary_and_drawn_with_the_seed():
    grammar, again = (Grammar(num_words=3, branching=2, seed=1) for _ in range(2))
    first = [grammar.sample(1, seed).item() for seed in range(1_000)]
    assert first[:99] == [again.sample(1, seed).item() for seed in range(99)]
    expected = grammar.stationary.reshape(3, 2).sum(axis=1)
    np.testing.assert_allclose(np.bincount(first) / 1_000, expected, atol=0.06)


def test_a_corpus_of_the_grammar_is_two_independent_samples_in_its_words():
    grammar = Grammar()
    corpus = grammar.corpus(500, 300)
    assert corpus.train.tolist() == grammar.sample(500, 0).tolist()
    assert corpus.valid.tolist() == grammar.sample(300, 1).tolist()
    assert len(corpus.vocabulary) == grammar.num_words


# Baselines


def after(tokens: Tensor, vocab_size: int, order: int = 2) -> np.ndarray:
    """Probabilities of every word, by column, after all other words, by row."""
    every = np.arange(vocab_size**order).reshape(-1, vocab_size)
    known = sequences(tokens, vocab_size, order)
    return probabilities(known, every, vocab_size, order)


def test_kneser_ney_takes_more_off_what_was_seen_oftener():
    # Pairs 01 and 10 occur three times, 02 twice, 20 once, less 1.5, 1 and 0.5; two
    # different words precede 0, one each precedes 1 and 2.
    table = after(torch.tensor([0, 1, 0, 1, 0, 1, 0, 2, 0, 2]), vocab_size=3)
    alone = np.array([2 - 1.0, 1 - 0.5, 1 - 0.5]) / 4 + 2.0 / 3 / 4
    seen = [[0, 1.5 / 5, 1.0 / 5], [1.5 / 3, 0, 0], [0.5, 0, 0]]
    np.testing.assert_allclose(table, np.array(seen) + 0.5 * alone)


@given(st.integers(1, 4), st.integers(2, 8), st.data())
@settings(max_examples=40)
def test_probabilities_sum_to_one_after_any_words(order, vocab_size, data):
    words = st.lists(st.integers(0, vocab_size - 1), min_size=order, max_size=60)
    table = after(torch.tensor(data.draw(words)), vocab_size, order)
    assert table.shape == (vocab_size ** (order - 1), vocab_size) and table.min() > 0
    np.testing.assert_allclose(table.sum(axis=1), 1, atol=1e-12)


def test_discounts_are_those_of_chen_and_goodman():
    numbers = [5, 40, 20, 10, 6, 3]
    share = 40 / (40 + 2 * 20)
    expected = [0, 1 - 2 * share / 2, 2 - 3 * share / 2, *[3 - 4 * share * 0.6] * 3]
    counts, expected = (np.repeat(of, numbers) for of in ([0, 1, 2, 3, 4, 9], expected))
    np.testing.assert_allclose(_discounts(counts), expected)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_baselines_reach_what_the_best_of_their_kind_can(order):
    """So a long sample is as surprising as the entropy rate says."""
    grammar = Grammar(seed=2, num_words=8, order=order)
    corpus, joint = grammar.corpus(60_000, 30_000), joint_of(grammar)
    for seen in range(order + 1):
        best = math.exp(conditional_entropy(joint, seen))
        near = pytest.approx(best, rel=0.03 if seen else 0.02)
        assert ngram_perplexity(corpus, seen + 1) == near
    assert (conditional_entropy(joint, 1) > 1.05 * grammar.entropy_rate) == (order > 1)


def test_a_perplexity_is_of_any_loss():
    assert perplexity(2.0) == math.exp(2) and perplexity(1e9) == math.inf


def test_single_words_are_scored_from_the_second_on_like_pairs():
    words, train = Vocabulary(("a", "b")), torch.tensor([0, 1, 1, 1, 1])
    corpus = Corpus(words, train, torch.tensor([0, 1, 1]))
    likely = probabilities(train.numpy(), np.array([1]), 2, 1)
    assert ngram_perplexity(corpus, 1) == pytest.approx(1 / likely[0])
