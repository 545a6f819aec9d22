"""Baselines to beat: models that count sequences of words, well smoothed.

For two words or more it is interpolated Kneser-Ney with three discounts, the best at
every size of text (Chen and Goodman, "An empirical study of smoothing techniques for
language modeling", Computer Speech and Language 13, 1999). Nothing needs tuning.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cdopt_tutorial.data.text import Corpus

# Discounts of the counts 0, 1, 2, and 3 or more, for a text too small or too regular to
# estimate them; KenLM has the same values.
_FALLBACK = np.array([0.0, 0.5, 1.0, 1.5])


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite if that overflows."""
    return math.inf if loss > 700 else math.exp(loss)  # NaN stays NaN


def ngram_perplexity(corpus: Corpus, order: int) -> float:
    """Perplexity of the validation part under a model of ``order`` words.

    Scored from the ``order``-th word on, single words from the second on, like pairs.
    Raises ValueError if int64 can't number the sequences.
    """
    vocab_size = len(corpus.vocabulary)
    if order < 1 or vocab_size**order >= 2**63:
        allowed = f"from 1 up to where {vocab_size}**order is below 2**63"
        raise ValueError(f"order is {order}, but must be {allowed}")
    texts = corpus.train, corpus.valid[1:] if order == 1 else corpus.valid
    known, scored = (sequences(of, vocab_size, order) for of in texts)
    likely = probabilities(known, scored, vocab_size, order)
    return float(np.exp(-np.log(likely).mean()))


def sequences(tokens: Tensor, vocab_size: int, order: int) -> NDArray[np.int64]:
    """All sequences of ``order`` words in tokens (n,), each a number to that base."""
    return tokens.unfold(0, order, 1).numpy() @ vocab_size ** np.arange(order)[::-1]


def probabilities(
    known: NDArray[np.int64], scored: NDArray[np.int64], vocab_size: int, order: int
) -> NDArray[np.float64]:
    """Probability of the last word of each scored sequence, given the others.

    It is the relative frequency among the known sequences, less a discount that depends
    on the count. The freed mass goes to the model of one word less, which counts how
    many different words precede a sequence (Kneser and Ney 1995). Single words are
    smoothed by the uniform distribution.
    """
    chance, share = np.zeros(scored.shape), np.ones(scored.shape)
    for length in range(order, 1, -1):
        grams, counts = np.unique(known, return_counts=True)
        before, place = np.unique(grams // vocab_size, return_inverse=True)
        discounts, totals = _discounts(counts), np.bincount(place, counts)
        seen = (counts - discounts) / totals[place]
        freed = np.bincount(place, discounts) / totals
        chance = chance + share * _find(scored, grams, seen, 0.0)
        share = share * _find(scored // vocab_size, before, freed, 1.0)
        shorter = vocab_size ** (length - 1)
        known, scored = grams % shorter, scored % shorter
    counts = np.bincount(known, minlength=vocab_size)
    discounts = _discounts(counts)
    alone = (counts - discounts + discounts.sum() / vocab_size) / counts.sum()
    return chance + share * alone[scored]


def _find(keys: NDArray, known: NDArray, values: NDArray, other: float) -> NDArray:
    """The values of keys in a sorted table, and ``other`` for missing keys."""
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, values[place], other)


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The discount of each count, the same from 3 on (Chen and Goodman 1999)."""
    once, twice, thrice, four = (np.count_nonzero(counts == n) for n in (1, 2, 3, 4))
    discounts = _FALLBACK
    if 0 not in (once, twice, thrice, four):
        share = once / (once + 2 * twice)
        taken = np.array([0, twice / once, thrice / twice, four / thrice])
        estimated = np.arange(4) - share * taken * np.arange(1, 5)
        if (estimated[1:] > 0).all():
            discounts = estimated
    return discounts[np.minimum(counts, 3)]
