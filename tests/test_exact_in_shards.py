"""What exact methods can do where a weight is spread, as the page to decide by says."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import orthogonal

from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.run import Role, launch, process_group

MAPS = "cayley", "matrix_exp", "householder"


def net(orthogonal_map: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    orthogonal(model[0], orthogonal_map=orthogonal_map)
    return model


def trained(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """All parameters after some steps of Adam, whole."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(6):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 12).double(), torch.randn(12, 3).double()


def play(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """Each rank with its share of the data, by each of torch's maps."""
    process_group.join(rank, ranks, gpus=())
    mesh, of_ranks = init_device_mesh("cpu", (ranks,)), []
    x, y = (part.chunk(ranks)[rank] for part in data())
    for orthogonal_map in MAPS:
        of_ranks.append(trained(fully_shard(net(orthogonal_map), mesh=mesh), x, y))
    return of_ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_torchs_orthogonal_before_fully_shard_is_that_of_one_process(ranks):
    roles = {f"rank{i}": Role(play, (i, ranks)) for i in range(ranks)}
    for of_rank in launch(roles).values():
        for orthogonal_map, there in zip(MAPS, of_rank, strict=True):
            here = trained(net(orthogonal_map), *data())
            assert max_difference(there, here) <= 1e-12
            start = dict(net(orthogonal_map).named_parameters())
            assert max_difference(start, here) > 1e-2


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
