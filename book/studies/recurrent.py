"""Does the constraint help the RNN? Chapter 4's study: 76 minutes on two cores.

The book's results are stored in cdopt_tutorial/parameter_server/study.json.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from controls import CONTROLS, treat
from runs import arguments
from study import Study
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrize
from tuning import compare

from cdopt_tutorial.calls import reference
from cdopt_tutorial.calls.steps import make_optimizer
from cdopt_tutorial.constraints import Constraints
from cdopt_tutorial.constraints.manifolds import manifold_of
from cdopt_tutorial.data import Stream, load_corpus
from cdopt_tutorial.parameter_server.model import RNNConfig, RNNModel, build, build_all
from cdopt_tutorial.parameter_server.system import evaluate

MAX_VOCAB = 1_000
CONFIG = RNNConfig(embedding=64, hidden=64)  # one pass over the text has 118 steps
STIEFEL = {"manifold": "stiefel"}
# How each kind treats its weight, and its settings if that is dissolved.
KINDS = {"free": ("", {}), CONTROLS[0]: (CONTROLS[0], {})}
KINDS |= {"Stiefel": ("Stiefel", STIEFEL)} | {way: (way, {}) for way in CONTROLS[1:]}
GATES, DECODER = {"per_gate": True}, {"where": "server", "penalty_param": 10.0}
for name, settings in {"per gate": GATES, "decoder": DECODER}.items():
    KINDS[f"{CONTROLS[0]}, {name}"] = CONTROLS[0], {}
    KINDS[f"Stiefel, {name}"] = "Stiefel", STIEFEL | settings


class RNN:
    """One run: a model of a kind, and its training in one process."""

    def __init__(self, kind: str, lr: float, seed: int, device: str):
        config = replace(CONFIG, lr=lr, seed=seed, device=device, **KINDS[kind][1])
        corpus = load_corpus(max_vocab=MAX_VOCAB)
        self.kind, self.halves = kind, corpus.valid.chunk(2)
        torch.manual_seed(seed)  # of the dropout and of torch's parametrizations
        self.parts, self.after_step = make(kind, config, len(corpus.vocabulary))
        self.parts.to(config.device)
        self.constraints = Constraints(self.parts) if config.constrained else None
        references = {name: reference(part) for name, part in self.parts.items()}
        self.model = RNNModel(references, config, config.device)
        self.optimizer = make_optimizer(self.parts.parameters(), config)
        self.stream = Stream(corpus.train, config.seq_len, config.batch_size)
        self.windows = self._windows()
        self.model.train()

    def _windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.hidden = self.model.start(self.stream.batch_size)
            yield from self.stream.windows()

    def step(self, lr: float) -> None:
        """Train on the next window."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens, targets = next(self.windows)
        with parametrize.cached():  # or torch's RNNs would compute their weights twice
            total, hidden = self.model.loss(tokens, targets, self.hidden)
            loss = total / targets.numel()
            if self.constraints is not None:
                loss = loss + self.constraints.penalty().to(loss)
            loss.backward()
        clip_grad_norm_(self.parts.parameters(), self.model.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()
        self.hidden = tuple(state.detach() for state in hidden)

    def look(self) -> tuple[float, ...]:
        """The losses of both halves of the held-out text, in nats."""
        losses = tuple(evaluate(self.model, half).loss for half in self.halves)
        self.model.train()
        return losses

    @torch.no_grad()
    def distance(self) -> float:
        """How far the treated weight, or the LSTM's stack, is from orthonormal."""
        layer, name, blocks = treated(self.kind, self.parts)
        weight = getattr(layer, name).double()
        return manifold_of("stiefel", weight, blocks).distance(weight).sqrt().item()


def treated(kind: str, parts: nn.ModuleDict) -> tuple[nn.Module, str, int]:
    """The layer that a kind treats, its weight's name, and the number of blocks."""
    if kind.endswith("decoder"):
        return parts["decoder"].decoder, "weight", 1
    return parts["rnn"], "weight_hh_l0", 4 if kind.endswith("per gate") else 1


def make(
    kind: str, config: RNNConfig, vocab_size: int
) -> tuple[nn.ModuleDict, Callable[[], None]]:
    """The parts of a kind's model, and what to call after each step.

    With one seed all kinds begin alike, up to the treated weight; that of the control
    of a dissolved decoder includes the decoder's factor.
    """
    parts, (way, _) = build_all(vocab_size, config), KINDS[kind]
    if way not in CONTROLS:
        return parts, lambda: None
    layer, name, blocks = treated(kind, parts)
    after_step = treat(way, layer, name, blocks)
    if kind.endswith("decoder"):
        dissolved = replace(config, **STIEFEL, **DECODER)
        layer.weight.data *= build("decoder", vocab_size, dissolved).scale.item()
    return parts, after_step


STUDY = Study(tuple(KINDS), RNN, steps=1_180, every=118, patience=354)

if __name__ == "__main__":
    compare(STUDY, arguments(__doc__))
