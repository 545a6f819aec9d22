"""What a model must beat: models that count sequences of words, smoothed well.

That of two words or more is interpolated Kneser-Ney with three discounts, the best of
all at every size of text (Chen and Goodman, "An empirical study of smoothing techniques
for language modeling", Computer Speech and Language 13, 1999). Nothing needs tuning.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cdopt_tutorial.data.text import Corpus

# Taken off counts of 0, 1, 2, and 3 or more where the text is too small or too regular
# to estimate them; the values are those of the KenLM toolkit.
_FALLBACK = np.array([0.0, 0.5, 1.0, 1.5])


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is too large to write."""
    return math.inf if loss > 700 else math.exp(loss)  # NaN stays one


class KneserNey:
    """How likely words are after those before them: modified, interpolated Kneser-Ney.

    Of the last ``order`` words, with the one in question, the relative frequency, less
    a discount by the count. What that leaves is shared out by the model of one word
    less, which counts how many different words a sequence was seen to follow (Kneser
    and Ney 1995). Learns from tokens (n,), at least ``order``, which is at least 2.
    """

    def __init__(self, tokens: Tensor, vocab_size: int, order: int = 2):
        if order < 2 or vocab_size**order >= 2**63:
            allowed = f"from 2 up to where {vocab_size}**order is below 2**63"
            raise ValueError(f"order is {order}, but must be {allowed}")
        self.order, self.vocab_size, self._levels = order, vocab_size, []
        grams, counts = np.unique(self.grams(tokens), return_counts=True)
        for length in range(order, 1, -1):
            before, place = np.unique(grams // vocab_size, return_inverse=True)
            discounts, totals = _discounts(counts), np.bincount(place, counts)
            seen = (counts - discounts) / totals[place]
            freed = np.bincount(place, discounts) / totals
            shorter = grams % vocab_size ** (length - 1)
            self._levels.append((grams, seen, before, freed))
            grams, counts = np.unique(shorter, return_counts=True)
        self._continued = unigram(shorter, vocab_size)

    def probability(self, grams: NDArray[np.int64]) -> NDArray[np.float64]:
        """How likely the last word of each sequence of ``order`` words is.

        A sequence is a number: its words are the digits, in the base ``vocab_size``.
        """
        found, share = np.zeros(grams.shape), np.ones(grams.shape)
        for length, level in zip(range(self.order, 1, -1), self._levels, strict=True):
            known, seen, before, freed = level
            found = found + share * _find(grams, known, seen, 0.0)
            share = share * _find(grams // self.vocab_size, before, freed, 1.0)
            grams = grams % self.vocab_size ** (length - 1)
        return found + share * self._continued[grams]

    def grams(self, tokens: Tensor) -> NDArray[np.int64]:
        """All sequences of ``order`` words in tokens (n,), as numbers."""
        windows = tokens.unfold(0, self.order, 1).numpy()
        return windows @ self.vocab_size ** np.arange(self.order)[::-1]


def _find(keys: NDArray, known: NDArray, values: NDArray, other: float) -> NDArray:
    """The values of keys by a sorted table; another value for what is not in it."""
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, values[place], other)


def unigram(words: NDArray[np.int64], vocab_size: int) -> NDArray[np.float64]:
    """How likely each word is, (vocab_size,): its frequency, smoothed."""
    counts = np.bincount(words, minlength=vocab_size)
    discounts = _discounts(counts)
    return (counts - discounts + discounts.sum() / len(counts)) / counts.sum()


def unigram_perplexity(corpus: Corpus) -> float:
    """Perplexity of the validation part, from its second word on, for unigrams."""
    words = unigram(corpus.train.numpy(), len(corpus.vocabulary))
    return _perplexity_of(words[corpus.valid.numpy()[1:]])


def bigram_perplexity(corpus: Corpus) -> float:
    """Perplexity of the validation part, from its second word on, for bigrams."""
    return ngram_perplexity(corpus, 2)


def ngram_perplexity(corpus: Corpus, order: int) -> float:
    """The same from the ``order``-th word on, for sequences of so many words."""
    model = KneserNey(corpus.train, len(corpus.vocabulary), order)
    return _perplexity_of(model.probability(model.grams(corpus.valid)))


def _perplexity_of(likely: NDArray[np.float64]) -> float:
    return float(np.exp(-np.log(likely).mean()))


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What to take off each count: one value for 3 and more (Chen and Goodman 1999)."""
    once, twice, thrice, four = (np.count_nonzero(counts == n) for n in (1, 2, 3, 4))
    discounts = _FALLBACK
    if 0 not in (once, twice, thrice, four):
        share = once / (once + 2 * twice)
        taken = np.array([0, twice / once, thrice / twice, four / thrice])
        estimated = np.arange(4) - share * taken * np.arange(1, 5)
        if (estimated[1:] > 0).all():
            discounts = estimated
    return discounts[np.minimum(counts, 3)]
