"""Everything that one can choose about the hybrid of DDP and RPC."""

import math
from dataclasses import dataclass

import torch

from cdopt_tutorial.engines.device import pick_device

SEMANTICS = ("exact", "original")
MANIFOLDS = ("none", "stiefel", "oblique")
PLACES = ("trainer", "server")
LAYERS = ("dissolve", "cdopt")
OPTIMIZERS = ("sgd", "adam")
DAY = 24 * 60 * 60
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class HybridConfig:
    """Settings of a run; checked when they are made.

    Attributes:
        num_trainers: trainers, at least 1.
        semantics: "exact": every step is that of one process on the joint batch; or
            "original": the dense layer follows the mean of the trainers' means, and
            each trainer applies its whole gradient of the table, at once.
        shares: each trainer's part of the training data, in any unit; None for equal
            ones.
        embedding: width of a token's vector.
        manifold: on which a weight is held: "none", "stiefel" or "oblique".
        where: whose: the dense layer's, which all "trainer"s have, or the table's, on
            the "server", with "oblique" only: each of its columns has norm 1.
        by: what constrains the dense layer: "dissolve", this book's, or "cdopt", the
            original's ``Linear_cdopt``. With "oblique", the former gives each class a
            vector of norm 1, the latter each column of the weight.
        penalty_param: factor of ‖C(W)‖² in the loss, above 0.
        optimizer: "sgd" or "adam".
        lr: its learning rate, above 0.
        momentum: of SGD, 0 to below 1.
        batch_size: images of a joint batch, of all trainers together.
        epochs: passes over the training data.
        max_steps: steps after which the run ends anyway; None for no limit.
        step_deadline: seconds from one place in a trainer's step to the next, such as
            from the lookup to the forward pass, after which the run fails and names
            whoever is furthest behind, or the server if that one waits for it. Ten
            times as long for what is done once or after an epoch. At most a day.
        seed: of the parameters' start and the order of the images.
        dtype: "float32" or "float64".
        device: of the dense layers, as
            :func:`~cdopt_tutorial.engines.device.pick_device` takes it and returns it;
            the trainers share out the GPUs of "cuda". The table is on the CPU.

    Raises:
        ValueError: a value is out of its range, or the device is not there.
    """

    num_trainers: int = 2
    semantics: str = "exact"
    shares: tuple[float, ...] | None = None
    embedding: int = 16
    manifold: str = "none"
    where: str = "trainer"
    by: str = "dissolve"
    penalty_param: float = 0.5
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    batch_size: int = 64
    epochs: int = 30
    max_steps: int | None = None
    step_deadline: float = 30.0
    seed: int = 1
    dtype: str = "float32"
    device: str = "auto"

    def __post_init__(self):
        for name, known in (
            ("semantics", SEMANTICS),
            ("manifold", MANIFOLDS),
            ("where", PLACES),
            ("by", LAYERS),
            ("optimizer", OPTIMIZERS),
            ("dtype", tuple(DTYPES)),
        ):
            self._check(name, getattr(self, name) in known, " or ".join(known))
        for name in ("num_trainers", "embedding", "batch_size", "epochs"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        limit = self.max_steps
        self._check("max_steps", limit is None or limit >= 1, "at least 1")
        for name in ("penalty_param", "lr"):
            fits = 0 < getattr(self, name) < math.inf
            self._check(name, fits, "above 0 and finite")
        fits = 0 < self.step_deadline <= DAY
        self._check("step_deadline", fits, f"above 0, and at most {DAY} (a day)")
        self._check("momentum", 0 <= self.momentum < 1, "0 to below 1")
        self._check("seed", 0 <= self.seed < 2**31, "at least 0 and below 2**31")
        self._check_shares()
        object.__setattr__(self, "device", pick_device(self.device))
        if self.where == "server" and self.manifold != "none":
            self._check("manifold", self.manifold == "oblique", "oblique on the server")
            self._check("by", self.by == "dissolve", "dissolve on the server")

    def _check(self, name: str, fits: bool, allowed: str) -> None:
        if not fits:
            value = getattr(self, name)
            raise ValueError(f"{name} is {value!r}, but must be {allowed}")

    def _check_shares(self) -> None:
        if self.shares is None:
            return
        fit = all(0 < share < math.inf for share in self.shares)
        if len(self.shares) != self.num_trainers or not fit:
            raise ValueError(
                f"shares are {self.shares}, but must be one above 0 for each of "
                f"{self.num_trainers} trainers"
            )

    @property
    def constrained(self) -> str | None:
        """The part of the model that is held on a manifold: "dense" or "table"."""
        if self.manifold == "none":
            return None
        return {"trainer": "dense", "server": "table"}[self.where]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return DTYPES[self.dtype]
