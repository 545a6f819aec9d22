"""Word vectors with sharded rows: the leading left singular vectors of a matrix.

Minimise f(X) = -‖MᵀX‖² / 2 over X (n, p) with XᵀX = I, where M (n, m) is sparse and m
is far less than n. Each rank has some of the n rows of M, and the same rows of X. For
the gradient of f the ranks sum up MᵀX, m x p numbers, once a step.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

from cdopt_tutorial.constraints.manifolds import Stiefel
from cdopt_tutorial.constraints.rivals import nearest
from cdopt_tutorial.constraints.sums import Sums
from cdopt_tutorial.run import Role, launch, process_group

if TYPE_CHECKING:
    from scipy import sparse

PENALTY_PARAM = 0.1  # from 0.05 to 0.2 the number of steps is the same
# Learning rate and Nesterov momentum of SGD. Each rate needed the fewest steps of a
# grid √2 or 2 apart, on 2,000 words.
WAYS = {
    "dissolved": (0.35, 0.95),  # A maps the rows where they lie
    # As the rate grows it tends to orthogonal iteration: MMᵀX, projected.
    "projected": (64, 0.0),
}


def run(
    matrix: "sparse.csr_matrix", way: str, p: int, steps: int, num_ranks: int = 1
) -> Tensor:
    """X (n, p) after some steps by one of ``WAYS``; each rank gets its rows of M."""
    parts = torch.arange(matrix.shape[0]).tensor_split(num_ranks)
    roles = {
        f"rank{k}": Role(_search, (k, num_ranks, way, p, steps, matrix[rows.numpy()]))
        for k, rows in enumerate(parts)
    }
    return torch.cat(list(launch(roles).values()))


def _search(
    rank: int, num_ranks: int, way: str, p: int, steps: int, rows: "sparse.csr_matrix"
) -> Tensor:
    """A rank's role: take steps, and return its rows of X."""
    process_group.join(rank, num_ranks, gpus=())
    mesh = init_device_mesh("cpu", (num_ranks,))
    sums = Sums(mesh=mesh, inner=(0,))  # over all ranks
    generator = torch.Generator().manual_seed(0)
    sketch = torch.randn(rows.shape[1], p, generator=generator)
    # It is feasible, and spans p random images of M.
    weight = nn.Parameter(nearest(_times(rows, sketch), sums))
    lr, momentum = WAYS[way]
    optimizer = optim.SGD([weight], lr, momentum, nesterov=momentum > 0)
    for _ in range(steps):
        optimizer.zero_grad()
        if way == "dissolved":
            x, distance = Stiefel().map_point(weight, sums)
        else:
            x, distance = weight, torch.zeros(())
        images = sums.inside(_times(rows.T, x))  # MᵀX, (m, p)
        gradient = -_times(rows, images)  # this rank's rows of the gradient of f at X
        ((x * gradient).sum() + PENALTY_PARAM * distance).backward()
        optimizer.step()
        if way == "projected":
            weight.data = nearest(weight.data, sums)
    return weight.detach()


def _times(matrix: "sparse.csr_matrix", x: Tensor) -> Tensor:
    # scipy's products are as fast as torch's, which warn that they are new.
    return torch.from_numpy(matrix @ x.detach().numpy())


def gap(matrix: "sparse.csr_matrix", x: Tensor) -> float:
    """How far f is above its minimum, relative, in one process.

    It is taken at the feasible point whose columns have the same span as those of X.
    """
    from scipy.sparse.linalg import svds  # takes long to import

    feasible, _ = torch.linalg.qr(x.double())
    options = {"random_state": 0, "return_singular_vectors": False}
    singular = svds(matrix.astype(float), x.shape[1], **options)
    return 1 - ((matrix.T @ feasible.numpy()) ** 2).sum() / (singular**2).sum()
