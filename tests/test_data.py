"""Texts, streams, the grammar of known entropy, and the baselines."""

import itertools
import math
from collections import Counter
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
    text,
)
from cdopt_tutorial.data.baselines import _discounts, probabilities, sequences
from cdopt_tutorial.data.text import documentation, tokenize

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


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"text \xff", "it cannot be read .*0xff in position 5"),
        (b"a b " * 499 + b"c", "it has 999 tokens .* at least 1000"),
        (b"%d " * 999 % (*range(999),) + b".", "no word to learn occurs twice"),
    ],
)
def test_what_is_no_text_is_refused(content, why, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=f"corpus '.*/file': {why}"):
        load_corpus(tmp_path / "file")


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
    known = corpus.vocabulary.words
    assert [known[token] for token in corpus.train] == words[:900]
    assert [known[token] for token in corpus.valid] == ["<unk>", "w00"] * 50
    small = load_corpus(tmp_path / "text", max_vocab=3)  # the most frequent words
    assert small.vocabulary.words == ("<unk>", "w01", "w00")


def test_of_ten_blocks_of_the_reference_the_fifth_is_held_out(monkeypatch):
    blocks = [f"block{i:03} " * text.BLOCK_TOKENS for i in range(100)]
    monkeypatch.setattr(text, "documentation", lambda: "\n\n".join(blocks))
    corpus = load_corpus()
    learned = {int(word[5:]) for word in corpus.vocabulary.words[1:]}
    assert set(range(100)) - learned == set(range(4, 100, 10))
    assert corpus.valid.tolist() == [0] * text.BLOCK_TOKENS * 10


# Stream


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 113), st.data())
def test_columns_follow_the_text_and_shards_share_them(seq_len, batch_size, more, data):
    tokens = torch.arange(batch_size + more) + 1_000
    stream = Stream(tokens, seq_len, batch_size)
    windows = list(stream.windows())
    assert {len(inputs) for inputs, _ in windows[:-1]} <= {seq_len}
    assert 1 <= len(windows[-1][0]) <= seq_len
    inputs, targets = (torch.cat(part) for part in zip(*windows, strict=True))
    rows = len(inputs)
    for column in range(batch_size):
        part = tokens[column * rows :]
        assert inputs[:, column].tolist() == part[:rows].tolist()
        assert targets[:, column].tolist() == part[1 : rows + 1].tolist()
    assert inputs.numel() == stream.num_tokens
    assert 0 <= len(tokens) - 1 - stream.num_tokens < batch_size
    start = data.draw(st.integers(0, len(stream)))
    shards = data.draw(st.integers(1, batch_size))
    parts = [stream.shard(rank, shards) for rank in range(shards)]
    sizes = [part.batch_size for part in parts]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    tails = (part.windows(start) for part in parts)
    for whole, *pieces in zip(windows[start:], *tails, strict=True):
        for tensor, cut in zip(whole, zip(*pieces, strict=True), strict=True):
            assert torch.equal(tensor, torch.cat(cut, dim=1))


# Grammar


def joint_of(grammar: Grammar) -> dict[tuple[int, ...], float]:
    """Probabilities of ``order`` + 1 successive words, as the docstring says."""
    joint, choices = {}, [range(grammar.branching)] * grammar.order
    walks = itertools.product(range(grammar.num_words), *choices)
    masses = grammar.stationary[:, None] * grammar.probabilities
    for (first, *chosen), mass in zip(walks, masses.ravel().tolist(), strict=True):
        walk = [first]
        for choice in chosen:
            walk.append(int(grammar.successors[walk[-1], choice]))
        joint[tuple(walk)] = mass
    return joint


def conditional_entropy(joint: dict[tuple[int, ...], float], order: int) -> float:
    """Of the last word, given the ``order`` words before it."""
    pairs, seen = Counter(), Counter()
    for words, mass in joint.items():
        pairs[words[-order - 1 :]] += mass
        seen[words[-order - 1 : -1]] += mass
    return -sum(mass * math.log(mass / seen[pair[:-1]]) for pair, mass in pairs.items())


@given(st.integers(2, 7), st.integers(2, 4), st.integers(0, 10**6), st.integers(1, 3))
def test_a_chain_reaches_every_word_is_stationary_and_has_its_entropy_rate(
    num_words, branching, seed, order
):
    grammar = Grammar(num_words, min(branching, num_words), seed, order)
    assert all(len(set(row)) == grammar.branching for row in grammar.successors)
    follows = np.zeros((num_words, num_words))
    np.put_along_axis(follows, grammar.successors, 1 / grammar.branching, axis=1)
    # Ergodic: one power is positive (Wielandt 1950).
    assert np.linalg.matrix_power(follows, (num_words - 1) ** 2 + 1).min() > 0
    assert min(grammar.probabilities.min(), grammar.stationary.min()) > 0
    np.testing.assert_allclose(grammar.probabilities.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(grammar.stationary.sum(), 1, atol=1e-12)
    joint, before, after = joint_of(grammar), Counter(), Counter()
    for words, mass in joint.items():
        before[words[:-1]] += mass
        after[words[1:]] += mass
    assert before == pytest.approx(after, abs=1e-12)
    expected = conditional_entropy(joint, order)
    assert grammar.entropy_rate == pytest.approx(expected, abs=1e-9)


def test_a_sample_is_drawn_with_its_seed_and_starts_in_a_stationary_context():
    grammar, again = (Grammar(num_words=3, branching=2, seed=1) for _ in range(2))
    corpus = grammar.corpus(500, 300)
    assert torch.equal(corpus.train, again.sample(500, 0))
    assert torch.equal(corpus.valid, again.sample(300, 1))
    first = [grammar.sample(1, seed).item() for seed in range(1_000)]
    expected = grammar.stationary.reshape(3, 2).sum(axis=1)
    np.testing.assert_allclose(np.bincount(first) / 1_000, expected, atol=0.06)


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


def test_single_words_are_scored_from_the_second_on_like_pairs():
    words, train = Vocabulary(("a", "b")), torch.tensor([0, 1, 1, 1, 1])
    corpus = Corpus(words, train, torch.tensor([0, 1, 1]))
    likely = probabilities(train.numpy(), np.array([1]), 2, 1)
    assert ngram_perplexity(corpus, 1) == pytest.approx(1 / likely[0])


@pytest.mark.parametrize("order", [0, 7])
def test_sequences_that_can_not_be_numbered_are_refused(order):
    words = Vocabulary(tuple(map(str, range(1000))))
    corpus = Corpus(words, torch.arange(9), torch.arange(9))
    with pytest.raises(ValueError, match=f"order is {order}, but must be from 1"):
        ngram_perplexity(corpus, order)
