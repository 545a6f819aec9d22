"""The settings, what a run returns, and the parts of the model that workers own."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdopt_tutorial import training
from cdopt_tutorial.calls import gradients
from cdopt_tutorial.calls.device import device_for, device_of
from cdopt_tutorial.calls.references import Reference, apply, reference
from cdopt_tutorial.checks import at_least, check, choices
from cdopt_tutorial.constraints import dissolve, dissolve_recurrent
from cdopt_tutorial.data import Vocabulary
from cdopt_tutorial.probes import trace

SAMPLED = 60  # tokens of a sample
TEMPERATURE = 0.7  # of a sample; below 1, likely words become likelier
ROW_NORM = 3.0  # initial mean norm of a constrained decoder's rows, times their factor

Hidden = tuple[Tensor, ...]  # h and c, (1, batch, hidden) each


@dataclass(frozen=True)
class RNNConfig(training.Settings):
    """Settings of a run; a ValueError if a value is out of its range."""

    #: what the decoder's owner returns: "logits", as in the original, or the "loss".
    cut: str = "loss"
    num_trainers: int = 1  #: trainers; each reads its own columns of the text
    #: whether trainers step together, by the sum of their gradients, or independently.
    sync: bool = True
    embedding: int = 128  #: width of a word's vector
    hidden: int = 128  #: width of the LSTM
    dropout: float = 0.4  #: share of activations set to 0 in training, 0 to below 1
    seq_len: int = 35  #: tokens through which a gradient flows
    batch_size: int = 20  #: columns of text read side by side, over all trainers
    optimizer: str = "adam"  #: "sgd" or "adam"
    lr: float = 4e-3  #: its learning rate, above 0
    lr_decay: float = 0.9  #: factor on lr after each epoch, above 0 and at most 1
    momentum: float = 0.9  #: of SGD, 0 to below 1
    manifold: str = "none"  #: of constrained weights: "none", "stiefel" or "oblique"
    #: whose weights: the "trainer"'s (the LSTM's, hidden to hidden) or the "server"'s
    #: (with "stiefel" the decoder's, with "oblique" the word vectors).
    where: str = "trainer"
    #: constrain each gate's matrix of the LSTM by itself, instead of all four stacked.
    per_gate: bool = False
    penalty_param: float = 1.0  #: factor of ‖C(W)‖² in the loss, above 0
    clip: float | None = 1.0  #: largest norm of the whole gradient; None for any
    epochs: int = 6  #: passes over the text
    max_steps: int | None = None  #: steps after which it ends; None for no limit
    #: steps between two checkpoints within an epoch, at which the random streams are
    #: reseeded, saved or not, so that a resumed run draws the same.
    save_every: int = 50
    seed: int = 1  #: of the initial parameters and the dropout
    dtype: str = "float32"  #: "float32" or "float64"
    #: of all parts, "auto", "cpu", "cuda" or "cuda:N"; the trainers share the GPUs of
    #: "cuda", and the server has the next one. What is sent is on the CPU.
    device: str = "cpu"

    def __post_init__(self):
        super().__post_init__()
        choices(self, cut=("logits", "loss"))
        at_least(self, 1, "hidden", "seq_len", "save_every")
        check(self, "dropout", 0 <= self.dropout < 1, "0 to below 1")
        check(self, "lr_decay", 0 < self.lr_decay <= 1, "above 0 and at most 1")
        check(self, "clip", self.clip is None or self.clip > 0, "above 0")
        fits = self.num_trainers <= self.batch_size
        check(self, "num_trainers", fits, f"at most batch_size, {self.batch_size}")
        fits = (self.manifold, self.where) == ("stiefel", "trainer")
        allowed = "False unless the manifold is stiefel on the trainer"
        check(self, "per_gate", fits or not self.per_gate, allowed)

    @property
    def constrained(self) -> str | None:
        """The part of the model that is constrained, if one is."""
        if self.manifold == "none":
            return None
        if self.where == "trainer":
            return "rnn"
        return {"stiefel": "decoder", "oblique": "embedding"}[self.manifold]


@dataclass
class History(training.History):
    """What a trainer returns; ``losses`` before a checkpoint are the joint batch's."""

    staleness: list[int] = field(default_factory=list)  #: of each step of this run
    tokens: int = 0  #: read in this run

    @property
    def perplexity(self) -> float:
        """Of the validation part, before the projection; the first trainer's only."""
        return [note.valid for note in self.progress if note.valid][-1].perplexity


class EmbeddingTable(nn.Module):
    """Word vectors, with dropout; lives on ``ps``."""

    def __init__(self, vocab_size: int, config: RNNConfig):
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.encoder = nn.Embedding(vocab_size, config.embedding)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Vectors (seq, batch, embedding) of tokens (seq, batch), on the CPU."""
        vectors = self.drop(self.encoder(tokens.to(device_of(self))).cpu())
        return trace.mark_backward("embedding backward", vectors, tokens)


class Decoder(nn.Module):
    """Scores of the next word, with dropout; lives on ``ps``."""

    def __init__(self, vocab_size: int, config: RNNConfig):
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.decoder = nn.Linear(config.hidden, vocab_size)
        self.scale: Tensor | float = 1.0
        if config.constrained == "decoder":
            # Orthonormal columns leave each word a short row, so a factor is learnt.
            start = ROW_NORM * math.sqrt(vocab_size / min(vocab_size, config.hidden))
            self.scale = nn.Parameter(torch.tensor(start))
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, output: Tensor) -> Tensor:
        """Logits (seq, batch, vocab) of an output (seq, batch, hidden), on the CPU."""
        return self.scores(output).cpu()

    def scores(self, output: Tensor) -> Tensor:
        """The same logits, on the decoder's device."""
        # Copies, since another trainer may step before the backward pass uses them.
        weight, scale = self.decoder.weight.clone(), self.scale * 1.0
        output = self.drop(output).to(device_of(self))
        return F.linear(scale * output, weight, self.decoder.bias)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy, in nats, of an output against the next tokens."""
        scores = self.scores(output)
        loss = summed_loss(scores, targets.to(scores.device)).cpu()
        return trace.mark_backward("decoder backward", loss, output)


def pull(lstm: nn.LSTM) -> list[Tensor]:
    """Runs on ``ps``: the weights that an LSTM computes with, on the CPU."""
    # An nn.Parameter would be pickled as a copy, outside the graph.
    return [weight.view_as(weight).cpu() for weight in lstm.all_weights[0]]


class PulledLSTM(nn.Module):
    """The LSTM of one of several trainers, which pulls its weights from ``ps``."""

    def __init__(self, rnn_rref: Reference):
        super().__init__()
        self.rnn_rref = rnn_rref

    def forward(self, inputs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """As in ``nn.LSTM``."""
        pulled = gradients.call(self.rnn_rref, pull)
        weights = [weight.to(inputs.device) for weight in pulled]
        # With biases, of one layer, without dropout, in one direction, time first.
        how = True, 1, 0.0, self.training, False, False
        output, *last = torch.lstm(inputs, hidden, weights, *how)
        return output, tuple(last)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of logits (seq, batch, vocab) and targets (seq, batch)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class RNNModel(nn.Module):
    """The whole model as a trainer sees it: the LSTM here, the rest by reference."""

    def __init__(
        self, parts: Mapping[str, Reference], config: RNNConfig, device: str = "cpu"
    ):
        super().__init__()
        self.embedding_rref, self.decoder_rref = parts["embedding"], parts["decoder"]
        rnn = parts["rnn"]
        self.rnn = rnn.local_value() if rnn.is_owner() else PulledLSTM(rnn)
        self.config, self.device = config, device  # the LSTM's

    def start(self, batch: int) -> Hidden:
        """The hidden state before the first token: zeros."""
        shape = 1, batch, self.config.hidden
        return tuple(torch.zeros(shape, dtype=self.config.torch_dtype) for _ in "hc")

    def recur(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """The LSTM's output (seq, batch, hidden) for tokens, on the CPU."""
        vectors = gradients.call(self.embedding_rref, EmbeddingTable.forward, tokens)
        hidden = tuple(state.to(self.device) for state in hidden)
        output, hidden = self.rnn(vectors.to(self.device), hidden)
        return output.cpu(), hidden

    def forward(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Logits (seq, batch, vocab) for tokens (seq, batch), and the hidden state."""
        output, hidden = self.recur(tokens, hidden)
        return gradients.call(self.decoder_rref, Decoder.forward, output), hidden

    def loss(
        self, tokens: Tensor, targets: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Hidden]:
        """Summed cross-entropy in nats, and the hidden state."""
        if self.config.cut == "logits":
            logits, hidden = self(tokens, hidden)
            return summed_loss(logits, targets), hidden
        output, hidden = self.recur(tokens, hidden)
        return gradients.call(self.decoder_rref, Decoder.loss, output, targets), hidden

    def train(self, mode: bool = True) -> "RNNModel":
        """Switch dropout here and on the server; ``eval()`` calls this, too."""
        super().train(mode)
        for rref in (self.embedding_rref, self.decoder_rref):
            apply(rref, _set_training, mode)
        return self


def _set_training(module: nn.Module, mode: bool) -> None:
    module.train(mode)  # returns the module, which would be sent back


# The parts of the model; the order gives each a seed of its own.
PARTS: dict[str, Callable[[int, RNNConfig], nn.Module]] = {
    "embedding": EmbeddingTable,
    "rnn": lambda _, config: nn.LSTM(config.embedding, config.hidden),
    "decoder": Decoder,
}


def build(part: str, vocab_size: int, config: RNNConfig) -> nn.Module:
    """One of the model's :data:`PARTS`: with one seed, the same on every worker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3 * config.seed + list(PARTS).index(part))
        module = PARTS[part](vocab_size, config).to(config.torch_dtype)
    if part == config.constrained:
        on = config.manifold, config.penalty_param
        if part == "rnn":
            dissolve_recurrent(module, *on, per_gate=config.per_gate)
        else:
            layer = "encoder" if part == "embedding" else "decoder"
            dissolve(module.get_submodule(layer), "weight", *on)
    return module


def build_own(part: str, vocab_size: int, config: RNNConfig, worker: int) -> nn.Module:
    """The same on its owner's device; called there."""
    return build(part, vocab_size, config).to(device_for(config.device, worker))


def build_all(vocab_size: int, config: RNNConfig) -> nn.ModuleDict:
    """All parts of the model, by name."""
    return nn.ModuleDict({part: build(part, vocab_size, config) for part in PARTS})


@torch.no_grad()
def sample(
    weights: Mapping[str, Tensor], config: RNNConfig, vocabulary: Vocabulary, begin: str
) -> str:
    """What a trained model writes after a word, in one process; never ``<unk>``."""
    parts = build_all(len(vocabulary), config)
    parts.load_state_dict(weights)
    model = RNNModel({n: reference(part) for n, part in parts.items()}, config).eval()
    generator = torch.Generator().manual_seed(0)
    tokens, hidden = vocabulary.encode([begin]).tolist(), model.start(1)
    while len(tokens) < SAMPLED:
        logits, hidden = model(torch.tensor([[tokens[-1]]]), hidden)
        chances = torch.softmax(logits[0, 0, 1:] / TEMPERATURE, dim=0)  # 0 is <unk>
        tokens.append(1 + torch.multinomial(chances, 1, generator=generator).item())
    return " ".join(vocabulary.words[token] for token in tokens)
