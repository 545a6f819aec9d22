"""What torch's own orthogonal weights do not bear, as the page to decide by says."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal


def test_weight_decay_makes_householders_weight_zero_and_cayleys_not():
    """As the page to decide by warns, and as torch 2.13 does by default."""
    norms = {}
    for orthogonal_map in (None, "cayley"):
        layer = orthogonal(nn.Linear(8, 4), orthogonal_map=orthogonal_map)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        layer(torch.ones(8)).sum().backward()
        optimizer.step()
        norms[orthogonal_map] = layer.weight.norm().item()
    assert norms[None] == 0
    assert norms["cayley"] == pytest.approx(2, abs=1e-5)


def test_torchs_orthogonal_gives_a_shared_weight_twice():
    table, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    head.weight = table.weight
    for layer in (table, head):
        orthogonal(layer)
    assert (table.weight - head.weight).norm() > 0.1
