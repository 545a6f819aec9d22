"""Does holding the weights help here? Ways to train compared, each at its own rate."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from cdopt_tutorial.data import perplexity
from cdopt_tutorial.engines import share
from cdopt_tutorial.sharding.kinds import HELD, KINDS, MuonAndAdam, distance, make
from cdopt_tutorial.sharding.model import Job, ShardConfig
from cdopt_tutorial.sharding.system import Trainer, held_out_loss

# Small, so that many runs are short, and within one pass over the text, of 322 steps.
CONFIG = ShardConfig("ddp", num_ranks=1, seq_len=16, max_steps=240, device="cpu")
# The rate of 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2 and 5e-2 with the lowest held-out loss
# on average over the seeds 101 to 103, found by `cdopt-tutorial bench holding`.
LEARNING_RATES = {
    "free": 5e-3,
    "orthogonal start": 5e-3,
    "Stiefel": 1e-2,
    "torch's orthogonal": 1e-2,
    "Muon": 1e-2,
    "Stiefel, MLP too": 2e-2,
}
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Run:
    """What a run gave."""

    kind: str  #: one of ``KINDS``
    lr: float  #: its learning rate
    seed: int  #: of the start; all read the same text in the same order
    losses: list[float]  #: of each step's batch before it is learned from, in nats
    held_out_loss: float  #: of the held-out text at the end, in nats
    #: ‖C‖ of what the attentions compute with at the end, A(W) where it is held: how
    #: far its blocks are from orthonormal, all together.
    distance: float
    seconds: float = field(compare=False)  #: that the run took; not compared

    @property
    def perplexity(self) -> float:
        """Of the held-out text at the end."""
        return perplexity(self.held_out_loss)


def config_of(
    kind: str, lr: float, seed: int, steps: int, device: str = "cpu"
) -> ShardConfig:
    """The settings of a run; a ValueError if a value is out of its range."""
    if kind not in KINDS:
        allowed = " or ".join(KINDS)
        raise ValueError(f"kind is {kind!r}, but must be {allowed}")
    held = "stiefel" if kind in HELD else "none"
    on = {"manifold": held, "device": device}
    return replace(CONFIG, lr=lr, seed=seed, max_steps=steps, **on)


def train(
    kind: str, lr: float, seed: int, steps: int = CONFIG.max_steps, device: str = "cpu"
) -> Run:
    """Train one kind in this process, which is a worker's in a study."""
    begin = time.perf_counter()
    config = config_of(kind, lr, seed, steps, device)
    job = Job(config)
    with torch.random.fork_rng(devices=[]):  # torch's orthogonal draws what it adds
        torch.manual_seed(seed)
        model = make(kind, config, len(job.corpus.vocabulary)).to(config.device)
    optimizer = MuonAndAdam(model, lr) if kind == "Muon" else None
    trainer = Trainer(job, model, model, optimizer=optimizer)
    losses = [trainer.step(*batch) for batch in islice(trainer.batches(), steps)]
    loss, off = held_out_loss(job, model), distance(model, config)
    return Run(kind, lr, seed, losses, loss, off, time.perf_counter() - begin)


def study(
    rates: Mapping[str, float] = LEARNING_RATES,
    seeds: Sequence[int] = SEEDS,
    steps: int = CONFIG.max_steps,
    device: str = "cpu",
    **options: Any,
) -> dict[str, list[Run]]:
    """Each kind's runs, in the order of the seeds, by two workers.

    The options are those of :func:`~.share.share`.
    """
    jobs = [(kind, lr, s, steps, device) for kind, lr in rates.items() for s in seeds]
    for job in jobs:
        config_of(*job)
    runs = share(train, jobs, **options)
    return {kind: [run for run in runs if run.kind == kind] for kind in rates}
