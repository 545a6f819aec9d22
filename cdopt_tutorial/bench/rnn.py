"""A step of a larger RNN in one process, with both cuts, and with two trainers."""

import statistics
from dataclasses import replace
from functools import partial

import torch

from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.data import Corpus, Vocabulary
from cdopt_tutorial.parameter_server import History, Job, RNNConfig, run, run_locally
from cdopt_tutorial.parameter_server.traffic import measured_bytes

CONFIG = RNNConfig(
    embedding=200, hidden=200, num_layers=2, dropout=0.2, seq_len=35, batch_size=20,
    optimizer="sgd", lr=0.1, clip=0.25, epochs=1, max_steps=14,
)  # fmt: skip
VOCAB_SIZE = 10_000
SMOKE, SMOKE_VOCAB_SIZE = {"embedding": 32, "hidden": 32, "max_steps": 4}, 500
WARM_UP = 2  # steps that do not count: buffers are made, pages touched
BASELINE = "local"
WAYS = {  # to train on workers
    "logits": {"cut": "logits"},
    "loss": {"cut": "loss"},
    "loss, 2 trainers": {"cut": "loss", "num_trainers": 2},
}
UNITS = {"step": "s", "tokens": "1/s", "bytes": "B/step"}


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants in turns; in a smoke run, one turn of a small model."""
    config = replace(CONFIG, device=device, **(SMOKE if smoke else {}))
    corpus = random_corpus(SMOKE_VOCAB_SIZE if smoke else VOCAB_SIZE, config)
    variants = {BASELINE: lambda _: _speed(config, run_locally(Job(config, corpus)))}
    for name, options in WAYS.items():
        variants[name] = partial(_figures, Job(replace(config, **options), corpus))
    return sweep(variants, 1 if smoke else 5, progress, UNITS, BASELINE)


def random_corpus(vocab_size: int, config: RNNConfig) -> Corpus:
    """Words drawn at random, enough for the steps: what they are takes no time."""
    generator = torch.Generator().manual_seed(0)
    tokens = config.max_steps * config.seq_len * config.batch_size + 1
    train = torch.randint(vocab_size, (tokens,), generator=generator)
    words = tuple(f"word{number}" for number in range(vocab_size))
    return Corpus(Vocabulary(words), train, train[: config.batch_size + 1])


def _figures(job: Job, turn: int) -> dict[str, float]:
    found = _speed(job.config, run(job)[0])
    if turn == 1:  # no turn sends more than another
        found["bytes"] = measured_bytes(job)
    return found


def _speed(config: RNNConfig, history: History) -> dict[str, float]:
    step = statistics.median(history.step_seconds[WARM_UP:])
    return {"step": step, "tokens": config.seq_len * config.batch_size / step}
