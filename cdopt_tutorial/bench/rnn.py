"""A step of the RNN in one process, with both cuts, and with two trainers."""

import statistics
from dataclasses import replace
from functools import partial

import torch

from cdopt_tutorial.bench.rows import Measured, Progress, compare, phases
from cdopt_tutorial.data import Corpus, Vocabulary
from cdopt_tutorial.parameter_server import History, Job, RNNConfig, run, run_locally
from cdopt_tutorial.parameter_server.traffic import expected_bytes, measured_bytes

CONFIG = RNNConfig(
    embedding=200, hidden=200, num_layers=2, dropout=0.2, seq_len=35, batch_size=20,
    optimizer="sgd", lr=0.1, clip=0.25, epochs=1, max_steps=14,
)  # fmt: skip
VOCAB_SIZE, SMOKE_VOCAB_SIZE = 10_000, 500
WARM_UP = 2  # steps that do not count: buffers are made, pages touched
TURNS = 5
BASELINE = "local"
UNITS = {"step": "s", "tokens": "1/s"}
UNITS |= dict.fromkeys(("bytes", "bytes by arithmetic"), "B/step")
UNITS |= dict.fromkeys(("forward", "backward", "optimizer"), "s/step")


def measure(progress: Progress, smoke: bool = False) -> Measured:
    """Time all variants in turns; in a smoke run, one turn of a small model."""
    config = replace(CONFIG, embedding=32, hidden=32, max_steps=10) if smoke else CONFIG
    job = Job(config, random_corpus(SMOKE_VOCAB_SIZE if smoke else VOCAB_SIZE, config))
    logits = replace(job, config=replace(config, cut="logits"))
    two_trainers = replace(job, config=replace(config, num_trainers=2))
    variants = {
        BASELINE: lambda _: _speed(config, run_locally(job)),
        "logits": partial(_figures, logits),
        "loss": partial(_figures, job),
        "loss, 2 trainers": partial(_figures, two_trainers),
    }
    turns = range(1, 2 if smoke else TURNS + 1)
    return compare(variants, turns, progress, UNITS, BASELINE)


def random_corpus(vocab_size: int, config: RNNConfig) -> Corpus:
    """Words drawn at random, enough for the steps: what they are takes no time."""
    generator = torch.Generator().manual_seed(0)
    tokens = config.max_steps * config.seq_len * config.batch_size + 1
    train = torch.randint(vocab_size, (tokens,), generator=generator)
    words = tuple(f"word{number}" for number in range(vocab_size))
    return Corpus(Vocabulary(words), train, train[: config.batch_size + 1])


def _figures(job: Job, _: int) -> dict[str, float]:
    each_phase = phases(run, job)
    speed, vocab_size = _speed(job.config, run(job)[0]), len(job.corpus.vocabulary)
    sent, expected = measured_bytes(job), expected_bytes(job.config, vocab_size)
    return speed | each_phase | {"bytes": sent, "bytes by arithmetic": expected}


def _speed(config: RNNConfig, history: History) -> dict[str, float]:
    step = statistics.median(history.step_seconds[WARM_UP:])
    return {"step": step, "tokens": config.seq_len * config.batch_size / step}
