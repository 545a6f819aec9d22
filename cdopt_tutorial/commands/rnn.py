"""`cdopt-tutorial rnn`: train a language model on a parameter server."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.commands.common import (
    add_training_flags,
    bad_input,
    check_finite,
    named_failure,
    print_difference,
    read_config,
    writable,
    write_json,
)
from cdopt_tutorial.data import (
    Grammar,
    bigram_perplexity,
    load_corpus,
    unigram_perplexity,
)
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import History, Job, RNNConfig

SMOKE_STEPS = 30
GRAMMAR = "grammar"
GRAMMAR_TOKENS = 100_000, 20_000


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_training_flags(parser, RNNConfig, run, without="momentum")
    flag = parser.add_argument
    flag("--async", dest="sync", action="store_false", help="the same as --no-sync")
    flag("--corpus", metavar="FILE", help="a text, or the word grammar")
    flag("--checkpoint", type=writable, metavar="FILE", help="keep checkpoints here")
    flag("--resume", type=Path, metavar="FILE", help="go on from this checkpoint")


def run(args: argparse.Namespace) -> int:
    """Train, evaluate, and compare; 1 if the training diverged."""
    with bad_input():
        job = read_job(args)
        rnn.check(job)
    with named_failure():
        histories = rnn.run(job, deadline=math.inf, on_report=_log)
        wire = rnn.traffic.measured_bytes(job)
    check_finite(histories[0].perplexity)
    found = _found(job, histories, wire)
    if args.against_local:
        found["max_parameter_difference"] = _difference(job, histories[0])
    write_json(args.json, found)
    print(
        f"validation perplexity {found['valid_perplexity']:.1f}, "
        f"bigram model {found['baseline_perplexity']:.1f}; "
        f"{found['tokens_per_second']:.0f} tokens/s, {wire:.0f} bytes a step"
    )
    return 0


def read_job(args: argparse.Namespace) -> Job:
    """The job that the flags describe.

    Raises:
        ValueError: a value is out of its range, or a file does not fit.
    """
    fixed: dict[str, Any] = {"max_steps": SMOKE_STEPS} if args.smoke else {}
    if args.against_local:
        fixed["dropout"] = 0.0
    config = read_config(args, RNNConfig, **fixed)
    if args.device not in ("auto", "cpu"):
        raise ValueError(f"device is {args.device!r}, but the rnn is for the cpu only")
    if args.against_local and not args.sync:
        raise ValueError("asynchronous trainers have no equal in one process")
    resume = args.resume and rnn.checkpoint.load(args.resume)
    if args.corpus == GRAMMAR:
        corpus = Grammar(seed=args.seed).corpus(*GRAMMAR_TOKENS)
    else:
        corpus = load_corpus(args.corpus)
    return Job(config, corpus, resume, args.checkpoint and args.checkpoint.absolute())


def _found(job: Job, histories: Sequence[History], wire: float) -> dict[str, Any]:
    """What goes into the JSON; losses in nats, times in seconds."""
    first, vocab_size = histories[0], len(job.corpus.vocabulary)
    return _constrained(first) | {
        "train_loss": first.progress[-1].train_loss,
        "valid_perplexity": first.perplexity,
        "baseline_perplexity": bigram_perplexity(job.corpus),
        "unigram_perplexity": unigram_perplexity(job.corpus),
        # Nothing is read where the checkpoint was of a complete run.
        "tokens_per_second": sum(h.tokens for h in histories) / (first.seconds or 1),
        "bytes_per_step": wire if math.isfinite(wire) else None,
        "expected_bytes_per_step": rnn.traffic.expected_bytes(job.config, vocab_size),
        "seconds": first.seconds,
        "steps": len(first.losses),
        "losses": [history.losses for history in histories],
        "staleness": [history.staleness for history in histories],
    }


def _constrained(history: History) -> dict[str, Any]:
    """What goes into the JSON of constrained weights: norms, after each step."""
    if history.projected is None:
        return {}
    return {
        "feasibility": {
            "weight": [found.weight for found in history.feasibility],
            "mapped": [found.mapped for found in history.feasibility],
        },
        "projected_perplexity": history.projected.perplexity,
        "projected_feasibility": history.projected.feasibility.weight,
    }


def _difference(job: Job, history: History) -> float:
    """Largest difference of any parameter from the same training in one process."""
    local = rnn.run_locally(replace(job, keep=None))
    return print_difference(max_difference(history.weights, local.weights))


def _log(_, note: rnn.Progress) -> None:
    if note.valid_loss is not None:
        print(
            f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}\t"
            f"validation perplexity {note.perplexity:.1f}",
            flush=True,
        )
