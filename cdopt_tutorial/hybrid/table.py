"""The table: what each server owns of it, and how a trainer reaches all of it.

Row t of the table is row t // k of server t mod k, of k servers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdopt_tutorial.calls import apply, gradients
from cdopt_tutorial.calls.device import device_for, device_of
from cdopt_tutorial.calls.references import Reference, begin
from cdopt_tutorial.constraints import Constraints, Feasibility, dissolve
from cdopt_tutorial.constraints.dissolved import Dissolved
from cdopt_tutorial.constraints.manifolds import Manifold, manifold_of
from cdopt_tutorial.constraints.sums import Sums
from cdopt_tutorial.hybrid.model import HybridConfig
from cdopt_tutorial.probes import trace

CHUNK = 16 * 1024  # rows drawn at once: of any width a multiple of 16 elements


class Table(nn.EmbeddingBag):
    """Vectors of one server's tokens, summed over each bag."""

    def __init__(self, num_tokens: int, config: HybridConfig, server: int = 0):
        rows = len(range(server, num_tokens, config.num_servers))
        dtype = config.torch_dtype
        super().__init__(rows, config.embedding, mode="sum", dtype=dtype)
        self.server, self.num_servers = server, config.num_servers
        draw_rows(self.weight, num_tokens, config, server)
        if config.constrained == "table" and not config.is_spread:
            on = config.manifold, config.penalty_param
            dissolve(self, "weight", *on, transpose=config.has_unit_columns)

    def forward(  # type: ignore[override]  # less than torch's takes
        self, tokens: Tensor, offsets: Tensor | None = None
    ) -> Tensor:
        """Vectors (b, embedding) of bags (b, m), or of b bags that begin at offsets.

        On the CPU, like all that is sent.
        """
        device = device_of(self)
        offsets = None if offsets is None else offsets.to(device)
        vectors = super().forward(tokens.to(device), offsets).cpu()
        return trace.mark_backward("table backward", vectors, tokens)

    def forward_and_sum(
        self, manifold: Manifold, tokens: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, and what C has a sum of: this server's part of it."""
        # Another trainer's step may come before this call's backward pass.
        part = manifold.summed(self.weight.clone(), Sums())
        return self(tokens, offsets), part.cpu()


@torch.no_grad()
def draw_rows(
    weight: Tensor, num_tokens: int, config: HybridConfig, server: int
) -> None:
    """Let a server's rows be those of one table, drawn with the seed, in chunks.

    So no server ever has the whole table.
    """
    generator = torch.Generator().manual_seed(2 * config.seed)
    chunk = weight.new_empty(min(CHUNK, num_tokens), config.embedding)
    for first in range(0, num_tokens, CHUNK):
        rows = chunk[: num_tokens - first].normal_(0, 0.01, generator=generator)
        own = rows[(server - first) % config.num_servers :: config.num_servers]
        start = len(range(server, first, config.num_servers))
        weight[start : start + len(own)] = own


def table_on_device(
    num_tokens: int, config: HybridConfig, rows: Tensor | None, server: int = 0
) -> Table:
    """A server's part, on the next device after the trainers'; called there.

    It begins with the rows, if there are any, and not those of the seed. Raises
    MemoryError if the server can't have what training them takes.
    """
    device = device_for(config.device, config.num_trainers + server)
    check_memory(len(range(server, num_tokens, config.num_servers)), config, device)
    table = Table(num_tokens, config, server)
    if rows is not None:
        with torch.no_grad():
            next(table.parameters()).copy_(rows)
    return table.to(device)


def check_memory(num_rows: int, config: HybridConfig, device: str) -> None:
    """Raise MemoryError, in one line, unless this process may have enough memory.

    On the CPU Linux hands out memory that it does not have; what is tested is this
    process's limit, as ``ulimit -d`` or ``-v`` sets it.
    """
    needed = training_bytes(num_rows, config)
    try:
        torch.empty(needed, dtype=torch.uint8, device=device)
    except RuntimeError:
        raise MemoryError(
            f"no {needed / 2**20:,.0f} MiB to train {num_rows:,} rows of "
            f"{config.embedding}: deal them out to more servers by num_servers"
        ) from None


def training_bytes(num_rows: int, config: HybridConfig) -> int:
    """The most that training so many rows takes on their server, in bytes.

    Each trainer's gradient has the shape of the rows, and so have their sum and mean,
    and what the optimizer keeps, or computes with.
    """
    copies = 1 + config.num_trainers + 2
    copies += 4 if config.optimizer == "adam" else 1
    if config.constrained == "table":  # measured, with rows of norm 1: graphs of A(W)
        copies += 6 * config.num_trainers
    return copies * num_rows * config.embedding * config.torch_dtype.itemsize


def name_of_table(config: HybridConfig) -> str:
    """The name of its parameter among a model's."""
    constrained = config.constrained == "table"
    return f"table.{'parametrizations.weight.original' if constrained else 'weight'}"


def split(tokens: Tensor, num_servers: int) -> list[tuple[Tensor, ...]]:
    """What each server looks up of bags (b, m): its rows, and where each bag begins."""
    if num_servers == 1:
        return [(tokens,)]
    parts = list[tuple[Tensor, ...]]()
    for server in range(num_servers):
        owned = tokens % num_servers == server  # (b, m)
        counts = owned.sum(1)
        parts.append((tokens[owned] // num_servers, counts.cumsum(0) - counts))
    return parts


class OnServers:
    """The table as a trainer has it: references to its parts, and to what steps them.

    Each method begins its calls to all servers before it waits for one.
    """

    def __init__(self, parts: Sequence[Reference], steps: Sequence[Reference]):
        self.parts, self._steps = parts, steps

    def lookup(self, tokens: Tensor) -> Tensor:
        """The vectors (b, embedding) of bags (b, m), with their graph."""
        return sum(self._ask("forward", tokens))

    def step(self, trainer: int, context: gradients.Context) -> None:
        """Move all parts by the gradients of a trainer's context."""
        self.on_servers("step", trainer, context)

    def on_servers(self, method: str | Callable, *args: Any) -> None:
        """Call a method, or a function, of what steps each part."""
        waits = [begin(step, method, *args) for step in self._steps]
        for wait in waits:
            wait()

    def weight(self) -> Tensor:
        """A copy of the whole free parameter, (num_tokens, embedding), on the CPU."""
        parts = [apply(part, _weight) for part in self.parts]
        whole = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
        for server, part in enumerate(parts):
            whole[server :: len(parts)] = part
        return whole

    def _ask(self, method: str, tokens: Tensor, *args: Any) -> list[Any]:
        split_tokens = split(tokens, len(self.parts))
        both = zip(self.parts, split_tokens, strict=True)
        waits = [gradients.ask(part, method, *args, *own) for part, own in both]
        return [wait() for wait in waits]


class ColumnsOnServers(OnServers):
    """The same with a constraint on columns, a part of which is on each server.

    A map of columns commutes with the sum over a bag. So the servers answer with sums
    of rows of W, and with their parts of what C has a sum of; whoever asks adds up both
    and maps. It has the methods of :class:`~.measure.Constraints`.
    """

    def __init__(
        self,
        parts: Sequence[Reference],
        steps: Sequence[Reference],
        num_tokens: int,
        config: HybridConfig,
    ):
        super().__init__(parts, steps)
        whole = torch.empty(num_tokens, config.embedding, device="meta")
        columns = config.has_unit_columns
        manifold = manifold_of(config.manifold, whole, transpose=columns)
        self._rule = Dissolved(manifold, config.penalty_param)
        self._c: Tensor  # with the graph of the last lookup

    def lookup(self, tokens: Tensor) -> Tensor:
        """The vectors (b, embedding) of bags (b, m), by A(W), with their graph."""
        manifold = self._rule.manifold
        answers = self._ask("forward_and_sum", tokens, manifold)
        vectors, total = (sum(parts) for parts in zip(*answers, strict=True))
        self._c = manifold.from_sum(total)
        return manifold.mapped(vectors, self._c, Sums())

    def penalty(self) -> Tensor:
        """``penalty_param`` ‖C(W)‖², in the graph of the last lookup."""
        return self._rule.penalty_param * self._c.square().sum()

    def feasibility(self) -> Feasibility:
        """The distance of the whole W from its manifold, in float64."""
        return Constraints(self._stand_in()).feasibility()

    def project_(self) -> None:
        """Move W to the feasible one nearest to A(W)."""
        stand_in = self._stand_in()
        (factor,) = stand_in.parameters()
        before = factor.detach().clone()
        Constraints(stand_in).project_()
        self._move(before, factor.detach())

    def begin_feasible(self) -> None:
        """Move W to the nearest feasible one, as ``dissolve`` does."""
        factor = self._factor()
        self._move(factor, self._rule.manifold.nearest(factor))

    def _stand_in(self) -> nn.Module:
        """A layer whose weight R, (p, p), has the same RᵀR as W has WᵀW.

        So W = QR with some orthonormal columns Q: it is as far from the manifold as R,
        and what moves R to RT moves W to WT.
        """
        layer = nn.Module()
        layer.weight = nn.Parameter(self._factor())
        parametrize.register_parametrization(layer, "weight", self._rule, unsafe=True)
        return layer

    def _factor(self) -> Tensor:
        """R, the symmetric root of WᵀW, in float64."""
        grams = [apply(part, _gram) for part in self.parts]
        squares, vectors = torch.linalg.eigh(sum(grams[1:], grams[0]))
        return vectors * squares.clamp(min=0).sqrt() @ vectors.mT

    def _move(self, factor: Tensor, moved: Tensor) -> None:
        """Move W as R is moved, also if its columns are linearly dependent."""
        small = torch.linalg.pinv(factor) @ moved
        for part in self.parts:
            apply(part, _multiply, small)


def _weight(table: Table) -> Tensor:
    """Runs on a server: a copy of its free parameter."""
    return next(table.parameters()).detach().to("cpu", copy=True)


def _gram(table: Table) -> Tensor:
    """Runs on a server: its part of WᵀW, (p, p), in float64."""
    weight = table.weight.detach().double()
    return (weight.mT @ weight).cpu()


@torch.no_grad()
def _multiply(table: Table, small: Tensor) -> None:
    """Runs on a server: W becomes W times a matrix (p, p), computed in float64."""
    small = small.to(device_of(table))
    table.weight.copy_(table.weight.double() @ small)
