"""What the study compares: free weights, held ones, and other ways to train."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize

from cdopt_tutorial.constraints.surface import surface
from cdopt_tutorial.sharding.model import (
    Block,
    ShardConfig,
    hold,
    to_hold,
    transformer,
)

KINDS = (
    "free",
    "orthogonal start",  # as "Stiefel", and free from there on
    "Stiefel",  # the attentions, by dissolving
    "torch's orthogonal",  # the same weights, exactly, by torch's parametrization
    "Muon",  # free, with steps that are orthogonal
    "Stiefel, MLP too",
)
HELD = ("Stiefel", "Stiefel, MLP too")  # which have a penalty


class Blocks(nn.Module):
    """torch's orthogonal parametrization, of each block of a weight's rows."""

    def __init__(self, weight: Tensor, blocks: int):
        super().__init__()
        part = nn.Module()
        part.weight = nn.Parameter(weight.detach().unflatten(0, (blocks, -1)))
        parametrizations.orthogonal(part, orthogonal_map="cayley")
        self.blocks, (self.map,) = blocks, part.parametrizations.weight

    def forward(self, free: Tensor) -> Tensor:
        """The weight, of a free parameter of its shape."""
        return self.map(free.unflatten(0, (self.blocks, -1))).flatten(0, 1)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The free parameter of a weight."""
        blocks = weight.unflatten(0, (self.blocks, -1))
        return self.map.right_inverse(blocks).flatten(0, 1)


class MuonAndAdam:
    """Muon for the matrices of the blocks, Adam for the rest, with one rate."""

    def __init__(self, model: nn.Module, lr: float):
        blocks = (part for part in model.modules() if isinstance(part, Block))
        inside = [value for block in blocks for value in block.parameters()]
        matrices = [value for value in inside if value.ndim == 2]
        known = set(matrices)
        rest = [value for value in model.parameters() if value not in known]
        # Its updates scaled to the size of Adam's, so that one rate serves both (Liu et
        # al., "Muon is scalable for LLM training", 2025); no other kind decays weights.
        as_adam = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        self.both = optim.Muon(matrices, lr, **as_adam), optim.Adam(rest, lr)

    def step(self) -> None:
        """One step of each."""
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        """Leave no gradient to move a parameter once more."""
        for each in self.both:
            each.zero_grad()


def make(kind: str, config: ShardConfig, vocab_size: int) -> nn.Sequential:
    """The model of a kind; a seed's all start alike, but for what is orthonormal.

    The same weights begin orthonormal, and as the same ones, where they are held, by
    whatever means, and where they only start so.
    """
    model = transformer(config, vocab_size)
    if kind in ("orthogonal start", "torch's orthogonal"):
        for layer, blocks in to_hold(model, config).items():
            nearest = surface("stiefel", layer.weight, blocks).nearest(layer.weight)
            layer.weight = nn.Parameter(nearest)
            if kind == "torch's orthogonal":
                rule = Blocks(nearest, blocks)
                parametrize.register_parametrization(layer, "weight", rule)
    where = {"Stiefel": ("attention",), "Stiefel, MLP too": ("attention", "mlp")}
    for each in where.get(kind, ()):
        hold(model, replace(config, manifold="stiefel", where=each))
    return model


@torch.no_grad()
def distance(model: nn.Module, config: ShardConfig) -> float:
    """How far from orthonormal the attentions' blocks are, all together."""
    layers = to_hold(model, config).items()
    weights = ((layer.weight.double(), blocks) for layer, blocks in layers)
    squares = (surface("stiefel", w, blocks).distance(w) for w, blocks in weights)
    return math.sqrt(sum(each.item() for each in squares))
