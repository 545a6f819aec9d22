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
        self.order, self.vocab_size = order, vocab_size
        grams, counts = np.unique(self._grams(tokens), return_counts=True)
        self._levels = []
        for length in range(order, 1, -1):
            self._levels.append(_Level(grams, counts, vocab_size))
            shorter = grams % vocab_size ** (length - 1)
            grams, counts = np.unique(shorter, return_counts=True)
        self._continued = unigram(shorter, vocab_size)

    def probability(self, grams: NDArray[np.int64]) -> NDArray[np.float64]:
        """How likely the last word of each sequence of ``order`` words is.

        A sequence is a number: its words are the digits, in the base ``vocab_size``.
        """
        found, share = np.zeros(grams.shape), np.ones(grams.shape)
        for length, level in zip(range(self.order, 1, -1), self._levels, strict=True):
            seen, freed = level.look_up(grams)
            found, share = found + share * seen, share * freed
            grams = grams % self.vocab_size ** (length - 1)
        return found + share * self._continued[grams]

    def perplexity(self, tokens: Tensor) -> float:
        """Perplexity of tokens (n,), of those with ``order`` - 1 others before them."""
        found = self.probability(self._grams(tokens))
        return float(np.exp(-np.log(found).mean()))

    def _grams(self, tokens: Tensor) -> NDArray[np.int64]:
        windows = tokens.unfold(0, self.order, 1).numpy()
        return windows @ self.vocab_size ** np.arange(self.order)[::-1]


class _Level:
    """Relative frequencies of sequences of one length, less a discount."""

    def __init__(self, grams: NDArray, counts: NDArray, vocab_size: int):
        self._grams, self._vocab_size = grams, vocab_size
        self._before, place = np.unique(grams // vocab_size, return_inverse=True)
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        totals = np.bincount(place, counts)
        self._seen = (counts - discounts) / totals[place]
        self._freed = np.bincount(place, discounts) / totals

    def look_up(self, grams: NDArray) -> tuple[NDArray, NDArray]:
        """What was seen of each, and the share that is left for shorter sequences."""
        seen = _find(grams, self._grams, self._seen, 0.0)
        return seen, _find(grams // self._vocab_size, self._before, self._freed, 1.0)


def _find(keys: NDArray, known: NDArray, values: NDArray, other: float) -> NDArray:
    """The values of keys by a sorted table; another value for what is not in it."""
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, values[place], other)


def unigram(words: NDArray[np.int64], vocab_size: int) -> NDArray[np.float64]:
    """How likely each word is, (vocab_size,): its frequency, smoothed."""
    counts = np.bincount(words, minlength=vocab_size)
    discounts = _discounts(counts)[np.minimum(counts, 3)]
    return (counts - discounts + discounts.sum() / len(counts)) / counts.sum()


def unigram_perplexity(corpus: Corpus) -> float:
    """Perplexity of the validation part, from its second word on, for unigrams."""
    words = unigram(corpus.train.numpy(), len(corpus.vocabulary))
    found = words[corpus.valid.numpy()[1:]]
    return float(np.exp(-np.log(found).mean()))


def bigram_perplexity(corpus: Corpus) -> float:
    """Perplexity of the validation part, from its second word on, for bigrams."""
    return ngram_perplexity(corpus, 2)


def ngram_perplexity(corpus: Corpus, order: int) -> float:
    """The same from the ``order``-th word on, for sequences of so many words."""
    model = KneserNey(corpus.train, len(corpus.vocabulary), order)
    return model.perplexity(corpus.valid)


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What to take off counts of 0, 1, 2, and 3 or more (Chen and Goodman 1999)."""
    once, twice, thrice, four = (np.count_nonzero(counts == n) for n in (1, 2, 3, 4))
    if 0 in (once, twice, thrice, four):
        return _FALLBACK
    share = once / (once + 2 * twice)
    taken = np.array([0, twice / once, thrice / twice, four / thrice])
    discounts = np.arange(4) - share * taken * np.arange(1, 5)
    return discounts if (discounts[1:] > 0).all() else _FALLBACK
