"""The original's model: a sparse part on the server, a dense part on every trainer."""

import threading
from collections.abc import Mapping

import torch
import torch.distributed.rpc as rpc
from cdopt import nn as cdopt_nn
from torch import Tensor, nn
from torch.distributed.nn.api.remote_module import RemoteModule

from cdopt_tutorial.constraints import MANIFOLDS, dissolve
from cdopt_tutorial.engines import span
from cdopt_tutorial.engines.remote import LocalRef, remote_method
from cdopt_tutorial.engines.trace import span_backward
from cdopt_tutorial.hybrid.config import HybridConfig

_seeding = threading.Lock()


class Table(nn.EmbeddingBag):
    """Vectors of tokens, summed over each bag; lives on ``ps``.

    The master makes it there, as a ``RemoteModule``.

    Args:
        num_tokens: rows.
        config: of the run; its seed fixes the parameters.
    """

    def __init__(self, num_tokens: int, config: HybridConfig):
        dtype = config.torch_dtype
        super().__init__(num_tokens, config.embedding, mode="sum", dtype=dtype)
        generator = torch.Generator().manual_seed(2 * config.seed)
        nn.init.normal_(self.weight, std=0.01, generator=generator)
        if config.constrained == "table":
            # Columns of norm 1. With rows, a token that was seldom seen would be as
            # loud as any other, and what it says is how it began.
            on = config.manifold, config.penalty_param
            dissolve(self, "weight", *on, transpose=True)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """The bags' vectors, (b, embedding)."""
        return span_backward(super().forward(tokens, offsets), "table backward")


def dense_layer(num_classes: int, config: HybridConfig) -> nn.Module:
    """The layer that all trainers have, the same wherever it is made.

    Args:
        num_classes: its outputs.
        config: of the run; its seed fixes the parameters.
    """
    sizes = config.embedding, num_classes
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(2 * config.seed + 1)
        if config.constrained == "dense" and config.by == "cdopt":
            return cdopt_nn.Linear_cdopt(
                *sizes,
                manifold_class=MANIFOLDS[config.manifold],
                penalty_param=config.penalty_param,
                dtype=config.torch_dtype,
            )
        layer = nn.Linear(*sizes, dtype=config.torch_dtype)
    if config.constrained == "dense":
        dissolve(layer, "weight", config.manifold, config.penalty_param)
    return layer


class HybridModel(nn.Module):
    """The model as a trainer sees it: the table elsewhere, the dense layer here.

    Args:
        table: the ``RemoteModule`` of a :class:`Table`, or the table itself.
        fc: the dense layer, in DDP where there are replicas of it.
        device: of the dense layer; what crosses the wire is on the CPU.
    """

    def __init__(self, table: RemoteModule | Table, fc: nn.Module, device: str):
        super().__init__()
        self.table, self.fc, self.device = table, fc, device

    def lookup(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """The bags' vectors (b, embedding), from wherever the table is."""
        with span("lookup"):
            # A RemoteModule that was sent to us has lost its hooks: only its forward
            # can be called.
            return self.table.forward(tokens, offsets)

    def scores(self, vectors: Tensor) -> Tensor:
        """Scores (b, num_classes) of the bags' vectors, as all trainers learn them."""
        with span("dense forward"):
            return self.fc(vectors.to(self.device))

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Scores (b, num_classes) of bags."""
        return self.scores(self.lookup(tokens, offsets))

    @property
    def dense(self) -> nn.Module:
        """The dense layer itself, with which one trainer may compute by itself."""
        return getattr(self.fc, "module", self.fc)


def reference(table: RemoteModule | Table) -> rpc.RRef | LocalRef:
    """A reference to the table, wherever it is."""
    if isinstance(table, RemoteModule):
        return table.get_module_rref()
    return LocalRef(table)


def weights_of(model: HybridModel) -> dict[str, Tensor]:
    """All parameters that are learnt, by name, on the CPU; asks ``ps`` for its own."""
    table = remote_method(learnt, reference(model.table))
    return named("table", table) | named("dense", learnt(model.dense))


def named(part: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part's parameters, by their names in the model."""
    return {f"{part}.{name}": value for name, value in values.items()}


def learnt(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's parameters but frozen ones; runs on its owner."""
    return {
        name: value.detach().cpu().clone()
        for name, value in module.named_parameters()
        if value.requires_grad  # Linear_cdopt registers a constant
    }


@torch.no_grad()
def begin_at(module: nn.Module, part: str, weights: Mapping[str, Tensor]) -> None:
    """Give a module its own of a model's parameters; runs on its owner.

    Args:
        module: the table or the dense layer.
        part: which: "table" or "dense".
        weights: by their names in the model; what is not named stays as it is.
    """
    for name, value in named(part, dict(module.named_parameters())).items():
        if name in weights:
            value.copy_(weights[name])
