"""Does a constraint help here? What chapter 6's study trains."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn, optim

from cdopt_tutorial.constraints.controls import CONTROLS, treat
from cdopt_tutorial.constraints.surface import surface
from cdopt_tutorial.sharding.model import (
    Job,
    ShardConfig,
    chosen_layers,
    constrain,
    transformer,
)
from cdopt_tutorial.sharding.system import Trainer, held_out_loss
from cdopt_tutorial.study import Study

# Small, so that many runs are short: one pass over the text has 322 steps.
CONFIG = ShardConfig("ddp", num_ranks=1, seq_len=16, device="cpu")
WAYS = CONTROLS[0], "Stiefel", *CONTROLS[1:]
# Of each kind, how its weights are trained, and which ones.
KINDS = {"free": ("free", ()), "Muon": ("Muon", ())}
KINDS |= {way: (way, ("attention",)) for way in WAYS}
KINDS |= {f"{way}, MLP too": (way, ("attention", "mlp")) for way in WAYS}
DISSOLVED = "Stiefel", "Stiefel, MLP too"


class Transformer:
    """One run: a model of a kind, and its training in this process."""

    def __init__(self, kind: str, lr: float, seed: int, device: str):
        on = {"manifold": "stiefel" if kind in DISSOLVED else "none", "device": device}
        self.config = replace(CONFIG, lr=lr, seed=seed, **on)
        job = Job(self.config)
        with torch.random.fork_rng(devices=[]):  # torch's parametrizations draw numbers
            torch.manual_seed(seed)
            size = len(job.corpus.vocabulary)
            self.model, self.afterwards = make(kind, self.config, size)
        self.model.to(self.config.device)
        self.trainer = Trainer(job, self.model, self.model)
        if kind == "Muon":
            self.trainer.optimizers = muon_and_adam(self.model, lr)
        else:
            self.trainer.optimizers = [optim.Adam(self.model.parameters(), lr)]
        self.batches = self.trainer.batches()
        halves = job.corpus.valid.chunk(2)
        self.jobs = [
            replace(job, corpus=replace(job.corpus, valid=half)) for half in halves
        ]

    def step(self, lr: float) -> None:
        """Train on the next batch."""
        for group in (g for o in self.trainer.optimizers for g in o.param_groups):
            group["lr"] = lr
        self.trainer.step(*next(self.batches))
        for each in self.afterwards:
            each()

    def look(self) -> tuple[float, float]:
        """The losses of both halves of the held-out text, in nats."""
        return tuple(held_out_loss(job, self.model) for job in self.jobs)

    @torch.no_grad()
    def distance(self) -> float:
        """How far from orthonormal the attentions' blocks are, all together."""
        squares = [
            surface("stiefel", layer.weight, b).distance(layer.weight.double()).item()
            for layer, b in chosen_layers(self.model, self.config).items()
        ]
        return math.sqrt(sum(squares))


STUDY = Study(__package__, tuple(KINDS), Transformer, 1_600, every=80, patience=480)


def make(
    kind: str, config: ShardConfig, vocab_size: int
) -> tuple[nn.Sequential, list[Callable[[], None]]]:
    """The model of a kind, and what follows each step.

    A seed's all start alike, but for what is orthonormal. The same weights begin
    orthonormal, and as the same ones, where they are held, by whatever means, and where
    they only start so.
    """
    model, (way, parts) = transformer(config, vocab_size), KINDS[kind]
    afterwards = []
    for part in parts:
        chosen = replace(config, manifold="stiefel", where=part)
        if way == "Stiefel":
            constrain(model, chosen)
            continue
        layers = chosen_layers(model, chosen).items()
        afterwards += [treat(way, each, blocks=blocks) for each, blocks in layers]
    return model, afterwards


def muon_and_adam(model: nn.Module, lr: float) -> list[optim.Optimizer]:
    """Adam, and torch's own Muon for the blocks' matrices."""
    matrices, rest = [], []
    for name, value in model.named_parameters():
        inside = name.startswith("block") and value.ndim == 2
        (matrices if inside else rest).append(value)
    # Its updates scaled to the size of Adam's, so that one rate serves both (Liu et
    # al., "Muon is scalable for LLM training", 2025); no other kind decays weights.
    as_adam = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    return [optim.Adam(rest, lr), optim.Muon(matrices, lr, **as_adam)]
