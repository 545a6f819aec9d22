"""A run's figures, and the bytes that a step sends, by arithmetic and as counted."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cdopt_tutorial import training
from cdopt_tutorial.data import Stream, ngram_perplexity
from cdopt_tutorial.parameter_server.model import History, RNNConfig, build
from cdopt_tutorial.parameter_server.system import Job, run


def expected_bytes(config: RNNConfig, vocab_size: int) -> int:
    """Bytes of the large tensors of one full window, of all trainers together.

    Word vectors, the LSTM's outputs and, with the cut "logits", the logits are sent one
    way, and their gradients the other; several trainers pull the LSTM's weights. An
    index has 8 bytes. The messages around them, 5 to 7 kB per step and trainer whatever
    the sizes, are not counted: they are below one per cent from about a megabyte on.
    """
    tokens = config.seq_len * config.batch_size
    numbers, indices = tokens * (config.embedding + config.hidden), tokens
    if config.cut == "logits":
        numbers += tokens * vocab_size
    else:
        indices += tokens  # the targets are sent, too
    if config.num_trainers > 1:
        weights = build("rnn", vocab_size, config).parameters()
        numbers += config.num_trainers * sum(weight.numel() for weight in weights)
    return 2 * numbers * config.torch_dtype.itemsize + 8 * indices


def measured_bytes(job: Job) -> float:
    """Bytes per step, as the workers' sockets count; NaN for a text of one window."""
    text = Stream(job.corpus.train, job.config.seq_len, job.config.batch_size)
    job = replace(job, resume=None, keep=None)
    return training.measured_bytes(run, job, len(text) - 1)


def figures(job: Job, trainers: Sequence[History], counted: bool) -> dict[str, Any]:
    """What the command writes: losses in nats, times in seconds, bytes if counted."""
    first, vocab_size = trainers[0], len(job.corpus.vocabulary)
    written = {
        "train_loss": first.progress[-1].train_loss,
        "valid_perplexity": first.perplexity,
        "baseline_perplexity": ngram_perplexity(job.corpus, 2),
        "unigram_perplexity": ngram_perplexity(job.corpus, 1),
        # No token is read, in no time, if the checkpoint was of a complete run.
        "tokens_per_second": sum(h.tokens for h in trainers) / (first.seconds or 1),
        "expected_bytes_per_step": expected_bytes(job.config, vocab_size),
        "seconds": first.seconds,
        "steps": len(first.losses),
        "losses": [history.losses for history in trainers],
        "staleness": [history.staleness for history in trainers],
    }
    if (end := first.projected) and end.score:  # norms, after each step and at the end
        written["feasibility"] = {
            "weight": [norms.weight for norms in first.feasibility],
            "mapped": [norms.mapped for norms in first.feasibility],
        }
        written["projected_perplexity"] = end.score.perplexity
        written["projected_feasibility"] = end.feasibility.weight
    sent = measured_bytes(job) if counted else math.nan
    written["bytes_per_step"] = sent if math.isfinite(sent) else None
    return written
