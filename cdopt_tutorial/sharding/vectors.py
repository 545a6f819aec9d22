"""Word vectors with sharded rows: the leading left singular vectors of a matrix.

Minimise f(X) = -‖MᵀX‖² / 2 over X (n, p) with XᵀX = I, where M (n, m) is sparse and m
is far less than n. Each rank has some of the n rows of M, and the same rows of X. For f
and its gradient the ranks sum up MᵀX, m x p numbers, once a step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import geoopt
import torch
import torch.distributed as dist
from scipy import sparse
from scipy.sparse.linalg import svds
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.utils import parametrizations

from cdopt_tutorial.checks import at_least, check
from cdopt_tutorial.constraints.formulas import Sums
from cdopt_tutorial.constraints.rivals import RULES, Rival, nearest
from cdopt_tutorial.constraints.surface import surface
from cdopt_tutorial.run import Role, launch, process_group

EVERY = 5  # steps between two measurements of the gap
PENALTY_PARAM = 0.1  # from 0.05 to 0.2 the number of steps is the same


@dataclass(frozen=True)
class Way:
    """One way to keep the constraint, and its optimizer, SGD with Nesterov's momentum.

    Each rate needed the fewest steps on a grid √2 or 2 apart: on 2,000 words, or 400
    for torch's parametrizations.
    """

    lr: float
    momentum: float = 0.95
    alone: bool = False  #: whether it needs all of X in one process


WAYS = {
    "dissolved": Way(0.35),  # A maps the rows where they lie
    "gathered": Way(0.35),  # each rank gathers X, as FSDP2 does, and maps all of it
    # As the rate grows it tends to orthogonal iteration: MMᵀX, projected.
    "projected": Way(64, momentum=0),
    "geoopt": Way(1, 0.9, alone=True),
    "cayley": Way(1.4, 0.9, alone=True),  # these three are torch's parametrizations
    "householder": Way(0.35, 0.9, alone=True),
    "matrix_exp": Way(0.7, 0.9, alone=True),
}


@dataclass(frozen=True)
class VectorsConfig:
    """Settings of a search; ValueError if one is out of range."""

    way: str = "dissolved"  #: one of ``WAYS``
    p: int = 64  #: columns of X
    num_ranks: int = 1
    accuracy: float = 1e-3  #: of f, relative to its minimum
    max_steps: int = 500

    def __post_init__(self):
        check(self, "way", self.way in WAYS, " or ".join(WAYS))
        at_least(self, 1, "p", "num_ranks")
        fits = self.num_ranks == 1 or not WAYS[self.way].alone
        check(self, "num_ranks", fits, f"1: {self.way} needs X in one process")


@dataclass
class Search:
    """What a rank found."""

    #: of f from its minimum, relative, at the feasible point whose columns have the
    #: same span; at the start, after every fifth step, and at the end.
    gap: list[float] = field(default_factory=list)
    seconds: float = 0.0  #: of all steps
    rows: Tensor | None = None  #: this rank's rows of the final X
    steps: int = 0  #: taken


def minimum(matrix: sparse.csr_matrix, p: int) -> float:
    """The minimum of f, by scipy, from the p largest singular values."""
    values = svds(
        matrix.astype(float), p, random_state=0, return_singular_vectors=False
    )
    return -(values**2).sum() / 2


def run(config: VectorsConfig, matrix: sparse.csr_matrix, least: float) -> list[Search]:
    """What each rank finds, given its rows of M and the minimum of f."""
    n, ranks = matrix.shape[0], config.num_ranks
    cuts = torch.arange(n).chunk(ranks)  # as `Shard` cuts
    if len(cuts) < ranks:
        raise ValueError(f"num_ranks is {ranks}, too many for a matrix of {n} rows")
    parts = [matrix[cut[0] : cut[-1] + 1] for cut in cuts]
    args = (config, n, least)
    roles = {f"rank{k}": Role(_search, (k, *args, parts[k])) for k in range(ranks)}
    return list(launch(roles).values())


def _search(
    rank: int, config: VectorsConfig, n: int, least: float, rows: sparse.csr_matrix
) -> Search:
    """A rank's role: take steps until f is near its minimum, or diverges."""
    process_group.join(rank, config.num_ranks, gpus=())
    mesh = init_device_mesh("cpu", (config.num_ranks,))
    objective, found = Objective(rows, mesh), Search()
    layout = {"shape": (n, config.p), "stride": (config.p, 1), "run_check": False}
    start = DTensor.from_local(objective.start(config.p), mesh, [Shard(0)], **layout)
    step, current = make_step(config, objective, start)
    for found.steps in range(config.max_steps + 1):
        last = found.steps == config.max_steps
        if last or found.steps % EVERY == 0:
            found.gap.append(1 - objective.value(current()) / least)
            if last or not config.accuracy < found.gap[-1] < 2:
                break
        began = time.perf_counter()
        step()
        found.seconds += time.perf_counter() - began
    found.rows = current().clone()
    return found


class Objective:
    """f, on a rank with some rows of M."""

    def __init__(self, rows: sparse.csr_matrix, mesh: DeviceMesh):
        self._rows = rows  # scipy's, whose products are as fast as torch's
        self._sums = Sums(wide=False, mesh=mesh, inner=(0,))  # over all ranks

    def start(self, p: int) -> Tensor:
        """This rank's rows of a feasible X, which spans p random images of M."""
        drawn = torch.Generator().manual_seed(0)
        sketch = torch.randn(self._rows.shape[1], p, generator=drawn)
        return nearest(_times(self._rows, sketch), self._sums)

    def images(self, x: Tensor) -> Tensor:
        """MᵀX (m, p), from this rank's rows of X."""
        return self._sums.inside(_times(self._rows.T, x))

    def gradient(self, x: Tensor) -> Tensor:
        """This rank's rows of the gradient of f."""
        return -_times(self._rows, self.images(x))

    def value(self, x: Tensor) -> float:
        """f at the feasible point whose columns have the span of those of X."""
        images, gram = self.images(x).double(), self._sums.gram(x).double()
        return -torch.linalg.solve(gram, images.T @ images).trace().item() / 2


def _times(matrix: sparse.sparray, x: Tensor) -> Tensor:
    return torch.from_numpy(matrix @ x.numpy())


def make_step(
    config: VectorsConfig, objective: Objective, start: DTensor
) -> tuple[Callable[[], None], Callable[[], Tensor]]:
    """A way's step, and a function that returns this rank's rows of the current X."""
    way = WAYS[config.way]
    how = {"lr": way.lr, "momentum": way.momentum}
    if way.alone:
        weight, point = _alone(config.way, start)
    else:
        weight = nn.Parameter(start.clone())
        point = weight.to_local
    if config.way in RULES:
        optimizer = Rival(config.way, {weight: surface("stiefel", weight)}, **how)
    else:
        kind = geoopt.optim.RiemannianSGD if config.way == "geoopt" else optim.SGD
        optimizer = kind([weight], nesterov=True, **how)
    mapped = {"dissolved": _dissolved, "gathered": _gathered}.get(config.way)

    def step() -> None:
        optimizer.zero_grad()
        own, *distance = (point(),) if mapped is None else mapped(weight)
        penalty = [PENALTY_PARAM * each for each in distance]
        gradients = [objective.gradient(own.detach()), *(None for _ in penalty)]
        torch.autograd.backward([own, *penalty], gradients)
        optimizer.step()

    return step, lambda: point().detach()


def _alone(way: str, start: DTensor) -> tuple[nn.Parameter, Callable[[], Tensor]]:
    """The parameter of an exact way, and a function that returns X."""
    if way == "geoopt":  # with the Euclidean metric: the default needs n x n numbers
        manifold = geoopt.Stiefel(canonical=False)
        weight = geoopt.ManifoldParameter(start.to_local(), manifold=manifold)
        return weight, lambda: weight
    layer = nn.Linear(*start.shape[::-1], bias=False, dtype=start.dtype)
    layer.weight = nn.Parameter(start.to_local())
    parametrizations.orthogonal(layer, orthogonal_map=way)
    return layer.parametrizations.weight.original, lambda: layer.weight


def _dissolved(weight: nn.Parameter) -> tuple[Tensor, Tensor]:
    mapped, distance = surface("stiefel", weight).map_and_distance(weight)
    return mapped.to_local(), distance


def _gathered(weight: nn.Parameter) -> tuple[Tensor, Tensor]:
    # Each rank's backward pass starts at its own rows; the gradients are summed.
    whole = weight.full_tensor(grad_placements=[Partial()])
    mapped, distance = surface("stiefel", whole).map_and_distance(whole)
    own = mapped.chunk(dist.get_world_size())[dist.get_rank()]
    return own, distance / dist.get_world_size()
