"""What a model must beat: unigram and bigram models, smoothed as well as is usual.

The bigram model is interpolated Kneser-Ney with three discounts, the best of all at
every size of text (Chen and Goodman, "An empirical study of smoothing techniques for
language modeling", Computer Speech and Language 13, 1999). Nothing needs to be tuned.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from cdopt_tutorial.data.text import Corpus

# Taken off counts of 0, 1, 2, and 3 or more where the text is too small or too regular
# to estimate them; the values are those of the KenLM toolkit.
_FALLBACK = np.array([0.0, 0.5, 1.0, 1.5])


class Bigram:
    """How likely words are after a given word: Kneser-Ney, modified, interpolated.

    A pair's relative frequency, less a discount by its count. What that leaves is
    shared out by how many different words each word was seen to follow (Kneser and Ney
    1995). Learns from tokens (n,), at least two.
    """

    def __init__(self, tokens: Tensor, vocab_size: int):
        words = tokens.numpy()
        pairs = words[:-1] * vocab_size + words[1:]
        self._pairs, counts = np.unique(pairs, return_counts=True)
        before, after = np.divmod(self._pairs, vocab_size)
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        totals = np.bincount(before, counts, minlength=vocab_size)
        freed = np.bincount(before, discounts, minlength=vocab_size)
        self._seen = (counts - discounts) / totals[before]
        self._freed = np.where(totals > 0, freed / np.maximum(totals, 1), 1.0)
        self._continued = unigram(after, vocab_size)

    def probability(self, before: ArrayLike, words: ArrayLike) -> NDArray[np.float64]:
        """Probabilities of words after the words ``before``, broadcast to one shape."""
        before, words = np.broadcast_arrays(before, words)
        pairs = before * len(self._freed) + words
        place = np.minimum(np.searchsorted(self._pairs, pairs), len(self._pairs) - 1)
        seen = np.where(self._pairs[place] == pairs, self._seen[place], 0.0)
        return seen + self._freed[before] * self._continued[words]


def unigram(words: NDArray[np.int64], vocab_size: int) -> NDArray[np.float64]:
    """How likely each word is, (vocab_size,): its frequency, smoothed."""
    counts = np.bincount(words, minlength=vocab_size)
    discounts = _discounts(counts)[np.minimum(counts, 3)]
    return (counts - discounts + discounts.sum() / len(counts)) / counts.sum()


def unigram_perplexity(corpus: Corpus) -> float:
    """Perplexity of the validation part, from its second word on, for unigrams."""
    train, valid = _parts(corpus)
    found = unigram(train.numpy(), len(corpus.vocabulary))[valid[1:]]
    return float(np.exp(-np.log(found).mean()))


def bigram_perplexity(corpus: Corpus) -> float:
    """Perplexity of the validation part, from its second word on, for bigrams."""
    train, valid = _parts(corpus)
    model = Bigram(train, len(corpus.vocabulary))
    found = model.probability(valid[:-1], valid[1:])
    return float(np.exp(-np.log(found).mean()))


def _parts(corpus: Corpus) -> tuple[Tensor, NDArray[np.int64]]:
    for name in ("train", "valid"):
        if (length := len(getattr(corpus, name))) < 2:
            raise ValueError(f"{name} has {length} tokens, but must have at least 2")
    return corpus.train, corpus.valid.numpy()


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What to take off counts of 0, 1, 2, and 3 or more (Chen and Goodman 1999)."""
    once, twice, thrice, four = (np.count_nonzero(counts == n) for n in (1, 2, 3, 4))
    if 0 in (once, twice, thrice, four):
        return _FALLBACK
    share = once / (once + 2 * twice)
    taken = np.array([0, twice / once, thrice / twice, four / thrice])
    discounts = np.arange(4) - share * taken * np.arange(1, 5)
    return discounts if (discounts[1:] > 0).all() else _FALLBACK
