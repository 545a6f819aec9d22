"""A compiled layer whose weight lies in shards: its sums are completed all the same."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from cdopt_tutorial import constraints
from cdopt_tutorial.engines import Role, launch, meeting

pytestmark = pytest.mark.xdist_group("constraints_compiled_shards")

STYLES = {"columns": (ColwiseParallel, 24), "rows": (RowwiseParallel, 4)}


def play(rank: int) -> dict[str, list[torch.Tensor]]:
    """The gradients of W without torch.compile and with it, by style."""
    dist.init_process_group("gloo", meeting("ranks"), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    return {name: gradients(mesh, *style) for name, style in STYLES.items()}


def gradients(mesh, style: type, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, rows).double(), torch.randn(3, 8, dtype=torch.double)
    parallelize_module(layer, mesh, style(input_layouts=Replicate()))
    penalty = constraints.Constraints(constraints.dissolve(layer)).penalty
    weight = layer.parametrizations.weight.original
    with torch.no_grad():
        weight.add_(0.1)

    def loss() -> torch.Tensor:
        y = layer(x)
        return y.square().sum() + penalty()

    found = []
    for way in (loss, torch.compile(loss, backend="aot_eager")):
        weight.grad = None
        way().backward()
        found.append(weight.grad.full_tensor())
    return found


@pytest.fixture(scope="module")
def left():
    return launch({f"rank{k}": Role(play, (k,)) for k in range(2)})["rank0"]


@pytest.mark.parametrize("name", STYLES)
def test_the_gradient_is_that_of_eager(name, left):
    eager, compiled = left[name]
    assert eager.any()
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-12)
