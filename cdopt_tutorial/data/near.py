"""Counts of how often the terms of a program stand near its frequent words."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import sparse

from cdopt_tutorial.data.text import source_files, tokenize

WINDOW = 2  # words on each side


@dataclass(frozen=True, eq=False)
class Near:
    """Terms, and how often each stands near each frequent word."""

    terms: list[str]  #: n words and pairs of words, the most frequent first
    #: (n, m), float32: square roots of counts, over the roots of their row and column
    #: sums. Like a correlation's, its singular values are at most 1; the leading left
    #: singular vectors are word vectors (Stratos, Collins and Hsu 2015).
    matrix: sparse.csr_matrix


@cache
def sources(package: str) -> list[str]:
    """The words and punctuation marks of an installed package's source code."""
    return [word for code in source_files(package) for word in tokenize(code)]


def load_near(package: str, n: int, contexts: int = 1000) -> Near:
    """Count n terms near ``contexts`` frequent words in the source code of a package.

    Raises ValueError if it is not installed.
    """
    tokens = sources(package)
    words = [word for word, _ in Counter(sorted(tokens)).most_common()]
    numbers = {word: number for number, word in enumerate(words)}
    ids = np.array([numbers[token] for token in tokens])
    firsts, pairs = np.unique(ids[:-1] * len(words) + ids[1:], return_inverse=True)
    counts = np.concatenate([np.bincount(ids), np.bincount(pairs)])
    frequent = np.argsort(-counts, kind="stable")[:n]
    rows = np.full(len(counts), -1)
    rows[frequent] = np.arange(n)
    near = _count(rows[ids], 1, ids, (n, contexts))
    roots = (near + _count(rows[len(words) + pairs], 2, ids, (n, contexts))).sqrt()
    sums = (np.asarray(roots.sum(axis)).ravel() for axis in (1, 0))
    left, right = (sparse.diags(np.maximum(total, 1) ** -0.5) for total in sums)
    texts = (f"{words[k // len(words)]} {words[k % len(words)]}" for k in firsts)
    names = [*words, *texts]
    matrix = (left @ roots @ right).tocsr().astype(np.float32)
    return Near([names[k] for k in frequent], matrix)


def _count(
    rows: np.ndarray, length: int, ids: np.ndarray, shape: tuple[int, int]
) -> sparse.csr_matrix:
    """How often each frequent word is near the term that begins at each token."""
    total = sparse.csr_matrix(shape)
    for distance in range(1, WINDOW + 1):
        for offset in (-distance, length - 1 + distance):
            begins = np.arange(max(0, -offset), min(len(rows), len(ids) - offset))
            row, column = rows[begins], ids[begins + offset]
            known = (row >= 0) & (column < shape[1])
            places = row[known], column[known]
            total += sparse.csr_matrix((np.ones(known.sum()), places), shape)
    return total
