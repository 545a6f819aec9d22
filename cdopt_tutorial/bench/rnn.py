"""A step of the RNN in one process, with both cuts, two trainers, and bare."""

import statistics
from dataclasses import replace
from functools import partial

import torch

from cdopt_tutorial.bench import bare
from cdopt_tutorial.bench.rows import Measured, Progress, against, phases, sweep
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
# What the program has not: a second layer, dropout, clipping.
AS_BARE = {"num_layers": 1, "dropout": 0.0, "clip": None, "optimizer": "adam"}
UNITS = {"step": "s", "tokens": "1/s"}
UNITS |= dict.fromkeys(("bytes", "bytes by arithmetic"), "B/step")
UNITS |= dict.fromkeys(("forward", "backward", "optimizer"), "s/step")


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time all variants in turns; in a smoke run, one turn of a small model."""
    config = replace(CONFIG, device=device)
    if smoke:
        config = replace(config, embedding=32, hidden=32, max_steps=10)
    vocab_size = SMOKE_VOCAB_SIZE if smoke else VOCAB_SIZE
    job = Job(config, random_corpus(vocab_size, config))
    logits = replace(job, config=replace(config, cut="logits"))
    two_trainers = replace(job, config=replace(config, num_trainers=2))
    variants = {
        BASELINE: lambda _: _speed(config, run_locally(job)),
        "logits": partial(_figures, logits),
        "loss": partial(_figures, job),
        "loss, 2 trainers": partial(_figures, two_trainers),
        "loss, as bare": partial(
            _figures, replace(job, config=replace(config, **AS_BARE))
        ),
        "bare": partial(_bare_figures, config, _program(config, vocab_size)),
    }
    measured = sweep(variants, 1 if smoke else TURNS, progress, UNITS, BASELINE)
    return against(measured, "loss, as bare", "bare", "step")


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


def _program(config: RNNConfig, vocab_size: int) -> str:
    """The bare one with these sizes, and as many windows as there are steps."""
    sizes = vocab_size, config.hidden, config.seq_len, config.batch_size
    rows = config.max_steps * config.seq_len + 1
    more = f"""VOCAB_SIZE, WIDTH, SEQ_LEN, BATCH_SIZE = {sizes}

def read_tokens():  # what they are takes no time
    return torch.randint(VOCAB_SIZE, [BATCH_SIZE * {rows}])
"""
    return bare.program("bare_rnn", more)


def _bare_figures(config: RNNConfig, program: str, _: int) -> dict[str, float]:
    step = bare.step_seconds(program, "DistributedOptimizer.step", WARM_UP)
    return {"step": step, "tokens": config.seq_len * config.batch_size / step}


def _speed(config: RNNConfig, history: History) -> dict[str, float]:
    step = statistics.median(history.step_seconds[WARM_UP:])
    return {"step": step, "tokens": config.seq_len * config.batch_size / step}
