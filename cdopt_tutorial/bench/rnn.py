"""A step of the RNN in one process, with both cuts, and with two trainers."""

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from cdopt_tutorial.bench.rows import Row, interleave, phases, rows
from cdopt_tutorial.data import Corpus, Vocabulary
from cdopt_tutorial.engines import Trace
from cdopt_tutorial.parameter_server import Job, RNNConfig, run, run_locally
from cdopt_tutorial.parameter_server.traffic import expected_bytes, measured_bytes

VOCAB_SIZE = 10_000
CONFIG = RNNConfig(
    embedding=200, hidden=200, num_layers=2, dropout=0.2, seq_len=35, batch_size=20,
    optimizer="sgd", lr=0.1, clip=0.25, epochs=1, max_steps=14,
)  # fmt: skip
WARM_UP = 2  # steps that do not count: buffers are made, pages touched
TURNS = 5
BASELINE = "local"
UNITS = {
    "step": "s",
    "tokens": "1/s",
    "bytes": "B/step",
    "bytes by arithmetic": "B/step",
    "forward": "s/step",
    "backward": "s/step",
    "optimizer": "s/step",
}
VARIANTS = {
    "local": CONFIG,
    "logits": replace(CONFIG, cut="logits"),
    "loss": CONFIG,
    "loss, 2 trainers": replace(CONFIG, num_trainers=2),
}


def measure(
    progress: Callable[[str], None], smoke: bool = False
) -> tuple[list[Row], dict]:
    """Time all variants in turns.

    Args:
        progress: called with a line before each measurement.
        smoke: one turn at a vocabulary of 500 and a width of 32.

    Returns:
        The rows, and every single value.
    """
    variants = {
        name: lambda _, name=name, config=config: _time(
            name, _size(config, smoke), smoke
        )
        for name, config in VARIANTS.items()
    }
    values = interleave(variants, range(1, 2 if smoke else TURNS + 1), progress)
    return rows(values, UNITS, BASELINE), {"values": values}


def _size(config: RNNConfig, smoke: bool) -> RNNConfig:
    return replace(config, embedding=32, hidden=32, max_steps=10) if smoke else config


def _time(name: str, config: RNNConfig, smoke: bool) -> dict[str, float]:
    job = Job(config, random_corpus(500 if smoke else VOCAB_SIZE, config))
    alone = name == BASELINE
    histories = [run_locally(job)] if alone else run(job)
    step = statistics.median(histories[0].step_seconds[WARM_UP:])
    found = {"step": step, "tokens": config.seq_len * config.batch_size / step}
    if not alone:
        trace = Trace()
        run(job, trace=trace)
        found |= phases(trace, "trainer0")
        found["bytes"] = measured_bytes(job)
        found["bytes by arithmetic"] = expected_bytes(
            config, len(job.corpus.vocabulary)
        )
    return found


def random_corpus(vocab_size: int, config: RNNConfig) -> Corpus:
    """Words drawn at random, enough for the steps: what they are takes no time."""
    generator = torch.Generator().manual_seed(0)
    tokens = config.max_steps * config.seq_len * config.batch_size + 1
    train = torch.randint(vocab_size, (tokens,), generator=generator)
    words = tuple(f"word{number}" for number in range(vocab_size))
    return Corpus(Vocabulary(words), train, train[: config.batch_size + 1])
