"""Does a constraint help the transformer? Chapter 6's study: 65 minutes on two cores.

The book's results are stored in cdopt_tutorial/sharding/study.json.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from controls import CONTROLS, treat
from runs import arguments
from study import Study
from torch import nn, optim
from tuning import compare

from cdopt_tutorial.constraints.manifolds import manifold_of
from cdopt_tutorial.sharding.model import (
    Job,
    ShardConfig,
    block_matrices,
    chosen_layers,
    constrain,
    transformer,
)
from cdopt_tutorial.sharding.system import Trainer, held_out_loss

# Small, to keep many runs short: one pass over the text takes 322 steps.
CONFIG = ShardConfig("ddp", num_ranks=1, seq_len=16, device="cpu")
WAYS = CONTROLS[0], "Stiefel", *CONTROLS[1:]
# For each kind, how weights are trained, and which ones.
KINDS = {"free": ("free", ()), "Muon": ("Muon", ())}
KINDS |= {way: (way, ("attention",)) for way in WAYS}
KINDS |= {f"{way}, MLP too": (way, ("attention", "mlp")) for way in WAYS}


class Transformer:
    """One run: a model of a kind, and its training in this process."""

    def __init__(self, kind: str, lr: float, seed: int, device: str):
        manifold = "stiefel" if KINDS[kind][0] == "Stiefel" else "none"
        how = {"manifold": manifold, "lr": lr, "seed": seed, "device": device}
        self.config = replace(CONFIG, **how)
        job = Job(self.config)
        with torch.random.fork_rng(devices=[]):  # torch's parametrizations draw numbers
            torch.manual_seed(seed)
            size = len(job.corpus.vocabulary)
            self.model, self.afterwards = make(kind, self.config, size)
        self.model.to(self.config.device)
        self.trainer = Trainer(job, self.model, self.model)
        if kind == "Muon":
            self.trainer.optimizers = muon_and_adam(self.model, lr)
        self.batches = self.trainer.batches()
        self.halves = job.corpus.valid.chunk(2)

    def step(self, lr: float) -> None:
        """Train on the next batch."""
        for group in (g for o in self.trainer.optimizers for g in o.param_groups):
            group["lr"] = lr
        self.trainer.step(*next(self.batches))
        for project in self.afterwards:
            project()

    def look(self) -> tuple[float, ...]:
        """The losses of both halves of the held-out text, in nats."""
        seq_len = self.config.seq_len
        return tuple(held_out_loss(self.model, half, seq_len) for half in self.halves)

    @torch.no_grad()
    def distance(self) -> float:
        """How far from orthonormal the blocks of all attentions are together."""
        squares = [
            manifold_of("stiefel", layer.weight, b)
            .distance(layer.weight.double())
            .item()
            for layer, b in chosen_layers(self.model, self.config).items()
        ]
        return math.sqrt(sum(squares))


def make(
    kind: str, config: ShardConfig, vocab_size: int
) -> tuple[nn.Sequential, list[Callable[[], None]]]:
    """The model of a kind, and what to call after each step.

    With one seed all kinds start alike, except for orthonormal weights. Those are the
    same whether they stay orthonormal, by whatever means, or only start so.
    """
    model, (way, parts) = transformer(config, vocab_size), KINDS[kind]
    afterwards = []
    for part in parts:
        chosen = replace(config, manifold="stiefel", where=part)
        if way == "Stiefel":
            constrain(model, chosen)
        else:
            layers = chosen_layers(model, chosen).items()
            afterwards += [treat(way, layer, blocks=heads) for layer, heads in layers]
    return model, afterwards


def muon_and_adam(model: nn.Module, lr: float) -> list[optim.Optimizer]:
    """Adam, and torch's own Muon for the blocks' matrices."""
    matrices = dict.fromkeys(block_matrices(model))
    rest = [p for p in model.parameters() if p not in matrices]
    # Its updates are scaled to the size of Adam's, so that one rate serves both (Liu et
    # al., "Muon is scalable for LLM training", 2025); no other kind decays weights.
    as_adam = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    return [optim.Adam(rest, lr), optim.Muon(matrices, lr, **as_adam)]


STUDY = Study(tuple(KINDS), Transformer, steps=1_600, every=80, patience=480)

if __name__ == "__main__":
    compare(STUDY, arguments(__doc__))
