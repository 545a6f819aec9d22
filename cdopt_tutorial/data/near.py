"""Counts of how often the terms of a program stand near its frequent words."""

from collections import Counter
from typing import Any

import numpy as np

from cdopt_tutorial.data.text import source_files, tokenize


def load_near(package: str, n: int, contexts: int = 1000) -> tuple[list[str], Any]:
    """The n most frequent terms in a package's source code, and what they stand near.

    A term is a word or a pair of words; near it are the two words on each side. Of how
    often it stands near each of the ``contexts`` most frequent words, the CSR matrix
    (n, contexts), float32, has the square root, over the roots of the sums of its row
    and its column. Like a correlation's, its singular values are at most 1; the leading
    left singular vectors are word vectors (Stratos, Collins and Hsu 2015).

    Raises ValueError if the package is not installed.
    """
    from scipy import sparse  # takes long to import

    tokens = [word for code in source_files(package) for word in tokenize(code)]
    words = [word for word, _ in Counter(sorted(tokens)).most_common()]
    numbers = {word: number for number, word in enumerate(words)}
    ids = np.array([numbers[token] for token in tokens])
    firsts, pairs = np.unique(ids[:-1] * len(words) + ids[1:], return_inverse=True)
    counts = np.concatenate([np.bincount(ids), np.bincount(pairs)])
    frequent = np.argsort(-counts, kind="stable")[:n]
    rows = np.full(len(counts), -1)
    rows[frequent] = np.arange(n)
    terms, near = [], []
    beyond = np.pad(ids, 2, constant_values=contexts)  # no frequent word
    for length, row in enumerate((rows[ids], rows[len(words) + pairs]), start=1):
        for offset in (-2, -1, length, length + 1):
            terms.append(row)
            near.append(beyond[2 + offset :][: len(row)])
    row, column = np.concatenate(terms), np.concatenate(near)
    known = (row >= 0) & (column < contexts)
    places = row[known], column[known]
    roots = sparse.csr_matrix((np.ones(known.sum()), places), (n, contexts)).sqrt()
    sums = (np.asarray(roots.sum(axis)).ravel() for axis in (1, 0))
    left, right = (sparse.diags(np.maximum(total, 1) ** -0.5) for total in sums)
    texts = (f"{words[k // len(words)]} {words[k % len(words)]}" for k in firsts)
    names = [*words, *texts]
    matrix = (left @ roots @ right).tocsr().astype(np.float32)
    return [names[k] for k in frequent], matrix
