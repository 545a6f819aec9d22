"""Word vectors in shards: the same as in one process, and as scipy's."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import svds

from cdopt_tutorial.data import near
from cdopt_tutorial.sharding import vectors

pytestmark = pytest.mark.xdist_group("vectors")


@pytest.fixture(scope="module")
def matrix():
    return near.load_near("IPython", 301, contexts=40)[1].astype(np.float64)


@pytest.mark.parametrize("way", vectors.WAYS)
def test_ranks_come_to_what_one_process_comes_to(matrix, way):
    here, *there = (vectors.run(matrix, way, 3, 20, ranks) for ranks in (1, 2, 3))
    for found in there:  # 301 rows cannot be cut evenly
        torch.testing.assert_close(found, here, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", vectors.WAYS)
def test_every_way_finds_the_leading_singular_vectors(matrix, way):
    found = vectors.run(matrix[:60], way, 3, steps=300)
    assert 0 <= vectors.gap(matrix[:60], found) <= 1e-6
    leading, _, _ = svds(matrix[:60], 3, random_state=0)
    cosines = np.linalg.svd(leading.T @ torch.linalg.qr(found)[0].numpy())[1]
    assert cosines.min() > 1 - 1e-3


def test_a_step_of_dissolving_is_that_of_one_gradient(matrix):
    found = vectors.run(matrix, "dissolved", 3, steps=1)
    lr, _ = vectors.WAYS["dissolved"]
    m = torch.from_numpy(matrix.toarray())
    sketch = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    left, _, right = torch.linalg.svd(m @ sketch, full_matrices=False)
    x = (left @ right).requires_grad_()
    c = x.T @ x - torch.eye(3)
    loss = -(m.T @ (x - x @ c / 2)).square().sum() / 2
    (loss + vectors.PENALTY_PARAM * c.square().sum()).backward()
    moved = 1.95 * x.grad  # Nesterov's first step
    torch.testing.assert_close(found, x.detach() - lr * moved, rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(words=st.lists(st.sampled_from("abcd"), min_size=8, max_size=30))
def test_counts_are_those_of_a_walk_through_the_text(words):
    with patch.object(near, "source_files", lambda _: [" ".join(words)]):
        terms, matrix = near.load_near("any", 2, contexts=2)
    frequent = sorted(set(words), key=lambda w: (-words.count(w), w))[:2]
    counts = np.zeros((2, 2))
    for row, term in enumerate(terms):
        parts = term.split()
        for begin in range(len(words) - len(parts) + 1):
            if words[begin : begin + len(parts)] == parts:
                before = words[max(0, begin - 2) : begin]
                after = words[begin + len(parts) :][:2]
                for word in before + after:
                    if word in frequent:
                        counts[row, frequent.index(word)] += 1
    roots = np.sqrt(counts)
    scale = np.sqrt(np.outer(*(roots.sum(axis).clip(1) for axis in (1, 0))))
    np.testing.assert_allclose(matrix.toarray(), roots / scale, rtol=1e-6)
