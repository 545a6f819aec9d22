"""Word vectors with sharded rows: the leading left singular vectors of a matrix.

Minimise f(X) = -‖MᵀX‖² / 2 over X (n, p) with XᵀX = I, where M (n, m) is sparse and m
is far less than n. Each rank has some of the n rows of M, and the same rows of X. For f
and its gradient the ranks sum up MᵀX, m x p numbers, once a step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy import sparse
from scipy.sparse.linalg import svds
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from cdopt_tutorial.checks import choices
from cdopt_tutorial.constraints.manifolds import Stiefel, stiefel_map
from cdopt_tutorial.constraints.rivals import nearest
from cdopt_tutorial.constraints.sums import Sums
from cdopt_tutorial.run import Role, launch, process_group

EVERY = 5  # steps between two measurements of the gap
PENALTY_PARAM = 0.1  # from 0.05 to 0.2 the number of steps is the same
# Learning rate and Nesterov momentum of SGD. Each rate needed the fewest steps of a
# grid √2 or 2 apart, on 2,000 words.
WAYS = {
    "dissolved": (0.35, 0.95),  # A maps the rows where they lie
    "gathered": (0.35, 0.95),  # each rank gathers X, as FSDP2 does, and maps all of it
    # As the rate grows it tends to orthogonal iteration: MMᵀX, projected.
    "projected": (64, 0.0),
}


@dataclass(frozen=True)
class VectorsConfig:
    """Settings of a search; ValueError if there is no such way."""

    way: str = "dissolved"  #: one of ``WAYS``
    p: int = 64  #: columns of X
    num_ranks: int = 1
    accuracy: float = 1e-3  #: of f, relative to its minimum
    max_steps: int = 500

    def __post_init__(self):
        choices(self, way=WAYS)


@dataclass
class Search:
    """What a rank found."""

    #: of f from its minimum at the end, relative, at the feasible point whose columns
    #: have the same span as those of X.
    gap: float = math.inf
    rows: Tensor | None = None  #: this rank's rows of the final X
    steps: int = 0  #: taken


def minimum(matrix: sparse.csr_matrix, p: int) -> float:
    """The minimum of f, by scipy, from the p largest singular values."""
    options = {"random_state": 0, "return_singular_vectors": False}
    return -(svds(matrix.astype(float), p, **options) ** 2).sum() / 2


def run(config: VectorsConfig, matrix: sparse.csr_matrix, least: float) -> list[Search]:
    """What each rank finds, given its rows of M and the minimum of f."""
    n, ranks = matrix.shape[0], config.num_ranks
    cuts = torch.arange(n).chunk(ranks)  # as `Shard` cuts
    if len(cuts) < ranks:
        raise ValueError(f"num_ranks is {ranks}, too many for a matrix of {n} rows")
    parts = [matrix[cut[0] : cut[-1] + 1] for cut in cuts]
    roles = {
        f"rank{rank}": Role(_search, (rank, config, n, least, rows))
        for rank, rows in enumerate(parts)
    }
    return list(launch(roles).values())


def _search(
    rank: int, config: VectorsConfig, n: int, least: float, rows: sparse.csr_matrix
) -> Search:
    """A rank's role: take steps until f is near its minimum, or diverges."""
    process_group.join(rank, config.num_ranks, gpus=())
    mesh = init_device_mesh("cpu", (config.num_ranks,))
    objective, search = Objective(rows, n, mesh), Search()
    weight = nn.Parameter(objective.start(config.p))
    step = make_step(config.way, objective, weight)
    for search.steps in range(config.max_steps + 1):
        last = search.steps == config.max_steps
        if last or search.steps % EVERY == 0:
            search.gap = 1 - objective.value(weight.detach()) / least
            if last or not config.accuracy < search.gap < 2:
                break
        step()
    search.rows = weight.detach()
    return search


class Objective:
    """f, on a rank with some of the n rows of M."""

    def __init__(self, rows: sparse.csr_matrix, n: int, mesh: DeviceMesh):
        self._rows = rows  # scipy's, whose products are as fast as torch's
        self.n, self.mesh = n, mesh
        self.sums = Sums(mesh=mesh, inner=(0,))  # over all ranks

    def start(self, p: int) -> Tensor:
        """This rank's rows of a feasible X, which spans p random images of M."""
        generator = torch.Generator().manual_seed(0)
        sketch = torch.randn(self._rows.shape[1], p, generator=generator)
        return nearest(_times(self._rows, sketch), self.sums)

    def images(self, x: Tensor) -> Tensor:
        """MᵀX (m, p), from this rank's rows of X."""
        return self.sums.inside(_times(self._rows.T, x))

    def gradient(self, x: Tensor) -> Tensor:
        """This rank's rows of the gradient of f."""
        return -_times(self._rows, self.images(x))

    def value(self, x: Tensor) -> float:
        """f at the feasible point whose columns have the span of those of X."""
        images, gram = self.images(x).double(), self.sums.gram(x).double()
        return -torch.linalg.solve(gram, images.T @ images).trace().item() / 2


def _times(matrix: sparse.sparray, x: Tensor) -> Tensor:
    return torch.from_numpy(matrix @ x.numpy())


def make_step(
    way: str, objective: Objective, weight: nn.Parameter
) -> Callable[[], None]:
    """A way's step of this rank's rows of X."""
    forward = {"dissolved": dissolved, "gathered": gathered}.get(way)
    lr, momentum = WAYS[way]
    optimizer = optim.SGD([weight], lr, momentum, nesterov=momentum > 0)

    def step() -> None:
        optimizer.zero_grad()
        rows, *penalty = forward(weight, objective) if forward else (weight,)
        gradients = [objective.gradient(rows.detach()), *(None for _ in penalty)]
        torch.autograd.backward([rows, *penalty], gradients)
        optimizer.step()
        if way == "projected":
            weight.data = nearest(weight.data, objective.sums)

    return step


def dissolved(weight: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """This rank's rows of A(X), from its rows of X, and the penalty."""
    mapped, distance = Stiefel().map_point(weight, objective.sums)
    return mapped, PENALTY_PARAM * distance


def gathered(weight: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """The same, from the whole X, which each rank gathers and maps."""
    mesh, stride = objective.mesh, weight.stride()
    shape = torch.Size((objective.n, weight.shape[1]))
    parts = DTensor.from_local(weight, mesh, [Shard(0)], shape=shape, stride=stride)
    # Each rank's backward pass starts at its own rows; the gradients are summed.
    mapped, distance = stiefel_map(parts.full_tensor(grad_placements=[Partial()]))
    rows = mapped.chunk(mesh.size())[mesh.get_rank()]
    return rows, PENALTY_PARAM * distance / mesh.size()
