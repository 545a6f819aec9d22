"""Does holding the weights help here? Kinds of training compared, each at its best."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize

from cdopt_tutorial.constraints.surface import surface
from cdopt_tutorial.engines import share
from cdopt_tutorial.sharding.model import Job, ShardConfig, hold, to_hold, transformer
from cdopt_tutorial.sharding.system import Trainer, held_out_loss

# Small, so that many runs are short: one pass over the text has 322 steps.
CONFIG = ShardConfig("ddp", num_ranks=1, seq_len=16, device="cpu")
WAYS = (
    "orthogonal start", "Stiefel", "torch's orthogonal", "projected", "same norm",
    "spectral norm",
)  # fmt: skip
# Of each kind, how its weights are trained, and which ones; in "same norm" they keep an
# orthonormal weight's norm, and in "spectral norm" their largest singular value is 1.
KINDS = {"free": ("free", ()), "Muon": ("Muon", ())}
KINDS |= {way: (way, ("attention",)) for way in WAYS}
KINDS |= {f"{way}, MLP too": (way, ("attention", "mlp")) for way in WAYS}
HELD = "Stiefel", "Stiefel, MLP too"
STEPS = 1_600
EVERY, PATIENCE = 80, 480  # steps between two looks at the held-out text; and in vain


def config_of(
    kind: str, lr: float, seed: int, steps: int, device: str = "cpu"
) -> ShardConfig:
    """The settings of a run; a ValueError if a value is out of its range."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, but must be {' or '.join(KINDS)}")
    on = {"manifold": "stiefel" if kind in HELD else "none", "device": device}
    return replace(CONFIG, lr=lr, seed=seed, max_steps=steps, **on)


def _trainer(kind: str, config: ShardConfig) -> tuple[nn.Module, Trainer]:
    job = Job(config)
    with torch.random.fork_rng(devices=[]):  # torch's parametrizations draw numbers
        torch.manual_seed(config.seed)
        model = make(kind, config, len(job.corpus.vocabulary)).to(config.device)
    trainer = Trainer(job, model, model)
    trainer.optimizers = make_optimizers(kind, model, config)
    return model, trainer


def converge(
    kind: str,
    lr: float,
    decay: str,
    warm_up: int,
    seed: int,
    steps: int = STEPS,
    device: str = "cpu",
    until: int | None = None,
) -> dict[str, Any]:
    """Train a kind for some steps, or until a held-out text gets no easier for long.

    The rate rises over ``warm_up`` steps, and then stays ("none") or falls to 0 with
    the last step ("cosine"). Every ``EVERY`` steps both halves of the held-out text
    are read: the first says when to stop, and which weights are the best. With
    ``until`` the run ends after so many steps, as if it were stopped there.

    Returned are the losses of both halves ("tuning", "test", in nats) at the best of
    these "steps", ‖C‖ of what the attentions compute with there ("distance"), the
    "last" step, "step_seconds", and the "curve": (tuning, test, step) of each look.
    """
    config = config_of(kind, lr, seed, steps, device)
    model, trainer = _trainer(kind, config)
    job, halves = trainer.job, trainer.job.corpus.valid.chunk(2)
    jobs = [replace(job, corpus=replace(job.corpus, valid=half)) for half in halves]

    def factor(step: int) -> float:
        falling = (1 + math.cos(math.pi * step / steps)) / 2 if decay == "cosine" else 1
        return falling * min(1.0, (step + 1) / warm_up) if warm_up else falling

    schedules = [optim.lr_scheduler.LambdaLR(o, factor) for o in trainer.optimizers]
    curve, best, seconds = [], (math.inf, math.inf, 0, 0.0), 0.0
    for step, batch in enumerate(islice(trainer.batches(), until or steps), 1):
        begin = time.perf_counter()
        trainer.step(*batch)
        for each in schedules:
            each.step()
        seconds += time.perf_counter() - begin
        if step % EVERY == 0:
            found = *(held_out_loss(each, model) for each in jobs), step
            curve.append(found)
            if found[0] < best[0]:
                best = *found, distance(model, config)
            elif step - best[2] >= PATIENCE or not math.isfinite(found[0]):
                break
    names = "tuning", "test", "steps", "distance"
    of_best = dict(zip(names, best, strict=True))
    return {**of_best, "last": step, "step_seconds": seconds / step, "curve": curve}


def stored() -> dict[str, Any]:
    """What `bench study` has written for the book.

    "tuned" has a row of each run that tuned, "chosen" the setting of each kind, and
    "runs" those of the other seeds, with a "curve" as :func:`converge` has it.
    """
    return json.loads((files(__package__) / "study.json").read_text())


def by_rate(kind: str) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """A curve for each seed that tuned a kind: rates, over the best, and perplexities.

    Of what is stored, with the schedule that all rates were tried with.
    """
    kept = stored()
    best = next(lr for name, lr, *_ in kept["chosen"] if name == kind)
    points: dict[int, list[tuple[float, float]]] = {}
    for run in kept["tuned"]:
        if (run["kind"], run["decay"]) == (kind, "cosine") and run["warm_up"]:
            point = run["lr"] / best, math.exp(run["tuning"])
            points.setdefault(run["seed"], []).append(point)
    return [tuple(zip(*sorted(of), strict=True)) for of in points.values()]


def repeat(
    kinds: Sequence[str], until: int, device: str = "cpu", **options: Any
) -> dict[str, dict[str, Any]]:
    """The first steps of what is stored of each kind and the first seed, run again.

    By two workers; the options are those of :func:`~.share.share`.
    """
    first = {run["kind"]: run for run in reversed(stored()["runs"])}
    names = "kind", "lr", "decay", "warm_up", "seed"
    jobs = [(*(first[k][n] for n in names), STEPS, device, until) for k in kinds]
    return dict(zip(kinds, share(converge, jobs, **options), strict=True))


def make(kind: str, config: ShardConfig, vocab_size: int) -> nn.Sequential:
    """The model of a kind; a seed's all start alike, but for what is orthonormal.

    The same weights begin orthonormal, and as the same ones, where they are held, by
    whatever means, and where they only start so.
    """
    model, (way, parts) = transformer(config, vocab_size), KINDS[kind]
    for part in parts:
        held = replace(config, manifold="stiefel", where=part)
        if way == "Stiefel":
            hold(model, held)
            continue
        for layer, blocks in to_hold(model, held).items():
            _begin(way, layer, blocks)
    return model


def _begin(way: str, layer: nn.Linear, blocks: int) -> None:
    """Have a layer begin as its way wants it."""
    if way == "same norm":
        size = (layer.weight.unflatten(0, (blocks, -1)).shape)[-2:]
        rule = SameNorm(blocks, math.sqrt(min(size)))
        parametrize.register_parametrization(layer, "weight", rule)
    elif way == "spectral norm":
        parametrizations.spectral_norm(layer)
    else:
        nearest = surface("stiefel", layer.weight, blocks).nearest(layer.weight)
        layer.weight = nn.Parameter(nearest)
        if way == "torch's orthogonal":
            _parametrize(layer, nearest.unflatten(0, (blocks, -1)))


class SameNorm(nn.Module):
    """Scales each of a weight's blocks of rows to one Frobenius norm."""

    def __init__(self, blocks: int, norm: float):
        super().__init__()
        self.blocks, self.norm = blocks, norm

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, scaled."""
        parts = weight.unflatten(0, (self.blocks, -1))
        norms = parts.square().sum((1, 2), keepdim=True).sqrt()
        return (self.norm / norms * parts).flatten(0, 1)


def _parametrize(layer: nn.Linear, start: Tensor) -> None:
    """Apply torch's orthogonal parametrization to each of a weight's blocks of rows."""
    layer.weight = nn.Parameter(start)
    parametrizations.orthogonal(layer, orthogonal_map="cayley")
    layer.weight = start  # completed anew, at random: so are the chapter's figures
    rows = nn.Flatten(0, 1)  # unsafe, as torch says, for it changes the shape
    parametrize.register_parametrization(layer, "weight", rows, unsafe=True)


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


@torch.no_grad()
def distance(model: nn.Module, config: ShardConfig) -> float:
    """How far from orthonormal the attentions' blocks are, all together."""
    squares = [
        surface("stiefel", layer.weight, blocks).distance(layer.weight.double()).item()
        for layer, blocks in to_hold(model, config).items()
    ]
    return math.sqrt(sum(squares))


class _Projected(optim.Optimizer):
    """Takes weights back to the manifold once others have moved them."""

    def __init__(self, layers: Mapping[nn.Linear, int]):
        super().__init__([layer.weight for layer in layers], {"lr": 0.0})
        self._layers = layers

    @torch.no_grad()
    def step(self) -> None:
        for layer, blocks in self._layers.items():
            on = surface("stiefel", layer.weight, blocks)
            layer.weight.copy_(on.nearest(layer.weight))


def make_optimizers(
    kind: str, model: nn.Module, config: ShardConfig
) -> list[optim.Optimizer]:
    """What moves a kind's parameters, all together."""
    way, parts = KINDS[kind]
    if way == "Muon":
        return muon_and_adam(model, config.lr)
    moves: list[optim.Optimizer] = [optim.Adam(model.parameters(), config.lr)]
    if way == "projected":
        layers = {}
        for part in parts:
            layers |= to_hold(model, replace(config, where=part))
        moves.append(_Projected(layers))
    return moves
