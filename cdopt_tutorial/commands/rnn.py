"""`cdopt-tutorial rnn`: train an RNN split over a trainer and a server."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cdopt_tutorial import data, torchrun
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.commands import check_writable, training
from cdopt_tutorial.parameter_server import History, Job, RNNConfig

GRAMMAR_TOKENS = 100_000, 20_000  # to train on, to validate on


@dataclass(frozen=True)
class Flags(training.Flags):
    """The flags, besides the fields of the config."""

    corpus: str | None = None  #: a file with a text, or the word grammar
    checkpoint: Path | None = None  #: keep checkpoints in this file
    resume: Path | None = None  #: go on from this checkpoint
    #: restart from the checkpoint when a worker dies, at most so many times
    max_restarts: int = 0


def run(arguments: list[str]) -> int:
    """Train and evaluate, as often as workers may die."""
    config, flags, options = training.read(
        "rnn", RNNConfig, Flags, arguments, max_steps=30
    )
    job = _job(config, flags)
    trainers = rnn.run(
        job, max_restarts=flags.max_restarts, on_report=training.log,
        on_restart=lambda error, _: print(
            f"{error.headline}: all begin again", flush=True
        ),
        **options,
    )  # fmt: skip
    training.check_finite(trainers[0].perplexity)
    # Only torch RPC's bytes can be counted: other engines' sockets carry much besides.
    wire = rnn.traffic.measured_bytes(job) if flags.engine == "rpc" else math.nan
    figures = _figures(job, trainers)
    figures["bytes_per_step"] = wire if math.isfinite(wire) else None
    repeat = partial(rnn.run_locally, replace(job, keep=None))
    return training.finish(flags, figures, trainers[0].weights, repeat)


def _job(config: RNNConfig, flags: Flags) -> Job:
    """The job, with its text and the checkpoint that it goes on from."""
    if flags.against_local and not config.sync:
        raise ValueError("asynchronous trainers have no equal in one process")
    keep, start = flags.checkpoint, flags.resume
    check_writable(keep)
    if keep is not None and keep == flags.json:
        raise ValueError(f"--checkpoint and --json are both {str(keep)!r}")
    if keep is not None and keep.exists():
        rnn.checkpoint.load(keep)  # or what is no checkpoint would be lost
        start = keep if torchrun.restarts() else start
    resume = rnn.checkpoint.load(start) if start else None
    if flags.corpus == "grammar":
        corpus = data.Grammar(seed=config.seed).corpus(*GRAMMAR_TOKENS)
    else:
        corpus = data.load_corpus(flags.corpus)
    return Job(config, corpus, resume, keep and keep.absolute())


def _figures(job: Job, trainers: list[History]) -> dict[str, Any]:
    """Losses in nats, times in seconds."""
    first = trainers[0]
    figures = {
        "train_loss": first.progress[-1].train_loss,
        "valid_perplexity": first.perplexity,
        "baseline_perplexity": data.ngram_perplexity(job.corpus, 2),
        "unigram_perplexity": data.ngram_perplexity(job.corpus, 1),
        # No token is read, in no time, if the checkpoint was of a complete run.
        "tokens_per_second": sum(h.tokens for h in trainers) / (first.seconds or 1),
        "expected_bytes_per_step": rnn.traffic.expected_bytes(
            job.config, len(job.corpus.vocabulary)
        ),
        "seconds": first.seconds,
        "steps": len(first.losses),
        "losses": [history.losses for history in trainers],
        "staleness": [history.staleness for history in trainers],
    }
    if (end := first.projected) and end.score:  # norms, after each step and at the end
        figures["feasibility"] = {
            "weight": [norms.weight for norms in first.feasibility],
            "mapped": [norms.mapped for norms in first.feasibility],
        }
        figures["projected_perplexity"] = end.score.perplexity
        figures["projected_feasibility"] = end.feasibility.weight
    return figures
