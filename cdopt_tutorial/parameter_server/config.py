"""Everything that one can choose about the RNN and its training."""

from dataclasses import dataclass

import torch

CUTS = ("logits", "loss")
OPTIMIZERS = ("sgd", "adam")
MANIFOLDS = ("none", "stiefel", "oblique")
PLACES = ("trainer", "server")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class RNNConfig:
    """Settings of a run; checked when they are made.

    Attributes:
        cut: what comes back from the decoder's owner: "logits", as in the original, or
            only the "loss", computed there.
        num_trainers: trainers, at least 1; each reads its own columns of the text.
        sync: whether several trainers step together, with their gradients summed,
            or each when it likes.
        embedding: width of a word's vector.
        hidden: width of the LSTM.
        num_layers: layers of the LSTM.
        dropout: share of activations set to 0 in training, 0 to below 1.
        seq_len: tokens through which a gradient flows.
        batch_size: columns of text read side by side, by all trainers together.
        optimizer: "sgd" or "adam".
        lr: its learning rate, above 0.
        lr_decay: factor on the learning rate after each epoch, above 0 and at most 1.
        momentum: of SGD, 0 to below 1.
        manifold: on which weights are held: "none", "stiefel" or "oblique".
        where: whose weights: the "trainer"'s LSTM, hidden to hidden, or the
            "server"'s: the decoder's with "stiefel", the word vectors with "oblique".
        per_gate: whether each gate's matrix of the LSTM is on a Stiefel manifold of
            its own; else all of them stacked are on one.
        penalty_param: factor of ‖C(W)‖² in the loss, above 0.
        clip: largest norm of the gradient over all workers; None does not clip.
        epochs: passes over the text.
        max_steps: steps after which the run ends anyway; None for no limit.
        save_every: steps between two checkpoints within an epoch, where a run keeps
            any. Chance begins anew at each of these steps, kept or not, so that a
            resumed run goes on as the first one would have.
        seed: of the parameters' start and the dropout.
        dtype: "float32" or "float64".

    Raises:
        ValueError: a value is out of its range.
    """

    cut: str = "loss"
    num_trainers: int = 1
    sync: bool = True
    embedding: int = 128
    hidden: int = 128
    num_layers: int = 1
    dropout: float = 0.4
    seq_len: int = 35
    batch_size: int = 20
    optimizer: str = "adam"
    lr: float = 4e-3
    lr_decay: float = 0.9
    momentum: float = 0.9
    manifold: str = "none"
    where: str = "trainer"
    per_gate: bool = False
    penalty_param: float = 1.0
    clip: float | None = 1.0
    epochs: int = 6
    max_steps: int | None = None
    save_every: int = 50
    seed: int = 1
    dtype: str = "float32"

    def __post_init__(self):
        for name, known in (
            ("cut", CUTS),
            ("optimizer", OPTIMIZERS),
            ("dtype", tuple(DTYPES)),
            ("manifold", MANIFOLDS),
            ("where", PLACES),
        ):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                allowed = " or ".join(known)
                raise ValueError(f"{name} is {value!r}, but must be {allowed}")
        counts = ["num_trainers", "embedding", "hidden", "num_layers", "epochs"]
        for name in [*counts, "seq_len", "batch_size", "save_every"]:
            self._at_least_1(name)
        if self.max_steps is not None:
            self._at_least_1("max_steps")
        if self.num_trainers > self.batch_size:
            raise ValueError(
                f"num_trainers is {self.num_trainers}, but each needs a column of "
                f"its own, and batch_size is {self.batch_size}"
            )
        for name in ("dropout", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                value = getattr(self, name)
                raise ValueError(f"{name} is {value}, but must be 0 to below 1")
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}, but must be above 0")
        if not 0 < self.lr_decay <= 1:
            raise ValueError(
                f"lr_decay is {self.lr_decay}, but must be above 0 and at most 1"
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}, but must be above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, but must be at least 0")
        if self.per_gate and (self.manifold, self.where) != ("stiefel", "trainer"):
            raise ValueError(
                "per_gate needs the manifold stiefel on the trainer, but that is "
                f"{self.manifold} on the {self.where}"
            )
        if not self.penalty_param > 0:
            raise ValueError(
                f"penalty_param is {self.penalty_param}, but must be above 0"
            )

    def _at_least_1(self, name: str) -> None:
        if getattr(self, name) < 1:
            value = getattr(self, name)
            raise ValueError(f"{name} is {value}, but must be at least 1")

    @property
    def constrained(self) -> str | None:
        """The part of the model that is held on a manifold, if one is."""
        if self.manifold == "none":
            return None
        if self.where == "trainer":
            return "rnn"
        return {"stiefel": "decoder", "oblique": "embedding"}[self.manifold]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return DTYPES[self.dtype]
