"""The original's language model, cut in two: what the server owns, what trains it."""

import math
import threading
from collections.abc import Sequence

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.nn import functional as F

from cdopt_tutorial.constraints import dissolve, dissolve_recurrent
from cdopt_tutorial.engines.remote import parameter_rrefs, remote_method
from cdopt_tutorial.parameter_server.config import RNNConfig

ROW_NORM = 3.0  # mean of a constrained decoder's rows at the start, with its factor

_seeding = threading.Lock()

Hidden = tuple[Tensor, Tensor]  # (num_layers, batch, hidden) each


class EmbeddingTable(nn.Module):
    """Word vectors, with dropout; lives on ``ps``.

    Args:
        vocab_size: number of words.
        config: of the run.
    """

    def __init__(self, vocab_size: int, config: RNNConfig):
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.encoder = nn.Embedding(vocab_size, config.embedding)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Vectors (seq, batch, embedding) of tokens (seq, batch)."""
        return self.drop(self.encoder(tokens))


class Decoder(nn.Module):
    """Scores of the next word, with dropout; lives on ``ps``.

    Args:
        vocab_size: number of words.
        config: of the run.
    """

    def __init__(self, vocab_size: int, config: RNNConfig):
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.decoder = nn.Linear(config.hidden, vocab_size)
        self._shared = config.num_trainers > 1 and not config.sync
        self.scale: Tensor | float = 1.0
        if config.constrained == "decoder":
            # Orthonormal columns leave the words short rows, so a factor is learnt
            # beside them.
            short = min(vocab_size, config.hidden)
            begin = ROW_NORM * math.sqrt(vocab_size / short)
            self.scale = nn.Parameter(torch.tensor(begin))
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, output: Tensor) -> Tensor:
        """Logits (seq, batch, vocab) of the LSTM's output (seq, batch, hidden)."""
        weight, scale = self.decoder.weight, self.scale
        if self._shared:
            # Another trainer's step may come before this one's backward pass, which
            # needs the weight as it was.
            weight, scale = weight.clone(), scale * 1.0
        return F.linear(scale * self.drop(output), weight, self.decoder.bias)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Sum over all tokens of the cross-entropy in nats: a scalar.

        Args:
            output: (seq, batch, hidden), of the LSTM.
            targets: (seq, batch), the next tokens.
        """
        with torch.set_grad_enabled(self.training):
            return summed_loss(self(output), targets)


class Recurrence(nn.LSTM):
    """The LSTM between the two; lives on the trainer, if there is only one.

    Args:
        config: of the run.
    """

    def __init__(self, config: RNNConfig):
        between = config.dropout if config.num_layers > 1 else 0.0
        super().__init__(
            config.embedding, config.hidden, config.num_layers, dropout=between
        )

    def with_weights(
        self, weights: Sequence[Tensor], inputs: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Hidden]:
        """The same function of other weights, in the order of ``all_weights``."""
        output, *last = torch.lstm(
            inputs, hidden, weights, True, self.num_layers, self.dropout,
            self.training, False, False,
        )  # fmt: skip
        return output, tuple(last)


class PulledRecurrence(nn.Module):
    """The LSTM of one of several trainers: its weights live on ``ps``.

    They are pulled with every forward pass. The pull is a call like any other, so the
    backward pass of distributed autograd carries their gradient back by itself.

    Args:
        rnn_rref: reference to the :class:`Recurrence` on the server.
        config: of the run.
    """

    def __init__(self, rnn_rref, config: RNNConfig):
        super().__init__()
        self._rnn_rref = rnn_rref
        self._shape = Recurrence(config).to("meta")  # the function, without weights

    def forward(self, inputs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """The same as an LSTM's."""
        weights = remote_method(give_weights, self._rnn_rref)
        return self._shape.with_weights(weights, inputs, hidden)


def give_weights(module: Recurrence) -> list[Tensor]:
    """The weights that an LSTM computes with, as plain tensors; runs on their owner."""
    # An nn.Parameter would be pickled as a copy, outside the graph.
    return [weight.view_as(weight) for layer in module.all_weights for weight in layer]


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropy of logits (seq, batch, vocab) and targets (seq, batch).

    The vocabulary is the last axis of the logits. The original gave it to a loss that
    takes the second axis for the classes.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class RNNModel(nn.Module):
    """The whole model as its trainer sees it: an LSTM here, the rest by reference.

    Lives on a trainer. The references are RRefs, or LocalRefs where all is in one
    process.

    Args:
        embedding_rref: reference to an :class:`EmbeddingTable`.
        decoder_rref: reference to a :class:`Decoder`.
        rnn: a :class:`Recurrence`, or a :class:`PulledRecurrence`.
        config: of the run.
    """

    def __init__(self, embedding_rref, decoder_rref, rnn: nn.Module, config: RNNConfig):
        super().__init__()
        self.embedding_rref, self.decoder_rref = embedding_rref, decoder_rref
        self.rnn, self.config = rnn, config

    def start(self, batch: int) -> Hidden:
        """The hidden state before the first token: zeros."""
        shape = self.config.num_layers, batch, self.config.hidden
        return tuple(torch.zeros(shape, dtype=self.config.torch_dtype) for _ in "hc")

    def recur(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Output (seq, batch, hidden) of the LSTM for tokens (seq, batch)."""
        vectors = remote_method(EmbeddingTable.forward, self.embedding_rref, tokens)
        return self.rnn(vectors, hidden)

    def forward(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Logits (seq, batch, vocab) for tokens (seq, batch), and the hidden state."""
        output, hidden = self.recur(tokens, hidden)
        return remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def loss(
        self, tokens: Tensor, targets: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Hidden]:
        """Summed cross-entropy in nats, by the model's cut, and the hidden state."""
        if self.config.cut == "logits":
            logits, hidden = self(tokens, hidden)
            return summed_loss(logits, targets), hidden
        output, hidden = self.recur(tokens, hidden)
        loss = remote_method(Decoder.loss, self.decoder_rref, output, targets)
        return loss, hidden

    def train(self, mode: bool = True) -> "RNNModel":
        """Switch dropout, here and on the server; ``eval()`` comes by here, too."""
        super().train(mode)
        for rref in (self.embedding_rref, self.decoder_rref):
            remote_method(set_training, rref, mode)
        return self

    def parameter_rrefs(self) -> dict[str, rpc.RRef]:
        """A reference to every parameter, wherever it lives, by its name."""
        by_part = {
            "embedding": remote_method(parameter_rrefs, self.embedding_rref),
            "rnn": parameter_rrefs(self.rnn),
            "decoder": remote_method(parameter_rrefs, self.decoder_rref),
        }
        return {
            f"{part}.{name}": rref
            for part, rrefs in by_part.items()
            for name, rref in rrefs.items()
        }


def set_training(module: nn.Module, mode: bool) -> None:
    """``module.train(mode)``, without its result, which would be sent back."""
    module.train(mode)


def build(part: str, vocab_size: int, config: RNNConfig) -> nn.Module:
    """One part of the model, the same wherever it is made.

    Args:
        part: "embedding", "rnn" or "decoder".
        vocab_size: number of words.
        config: of the run; its seed fixes the parameters.
    """
    makers = {
        "embedding": lambda: EmbeddingTable(vocab_size, config),
        "rnn": lambda: Recurrence(config),
        "decoder": lambda: Decoder(vocab_size, config),
    }
    # Two parts may be asked for at once, and torch has one stream of chance.
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(3 * config.seed + list(makers).index(part))
        module = makers[part]().to(config.torch_dtype)
    return constrain(module, config) if part == config.constrained else module


def constrain(module: nn.Module, config: RNNConfig) -> nn.Module:
    """Hold a part's weights on the manifold, by constraint dissolving."""
    on = config.manifold, config.penalty_param
    match module:
        case Recurrence():
            dissolve_recurrent(module, *on, per_gate=config.per_gate)
        case EmbeddingTable():
            dissolve(module.encoder, "weight", *on)
        case Decoder():
            dissolve(module.decoder, "weight", *on)
    return module
