"""`cdopt-tutorial rnn`: train a language model on a parameter server."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cdopt_tutorial import data, torchrun
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.calls.errors import WorkerLost
from cdopt_tutorial.commands import common, training
from cdopt_tutorial.parameter_server import History, Job, RNNConfig

SMOKE = {"max_steps": 30}
GRAMMAR_TOKENS = 100_000, 20_000  # to train on, to validate on


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    training.add_flags(parser, RNNConfig)
    flag = parser.add_argument
    flag("--corpus", metavar="FILE", help="a text, or the word grammar")
    keep = "keep checkpoints here"
    flag("--checkpoint", type=common.replaceable, metavar="FILE", help=keep)
    flag("--resume", type=Path, metavar="FILE", help="go on from this checkpoint")
    restarts = "when a worker dies, restart from the checkpoint, at most N times"
    flag("--max-restarts", type=int, default=0, metavar="N", help=restarts)


def run(args: argparse.Namespace) -> None:
    """Train, evaluate, and compare; 1 if the training diverged."""
    with common.bad_input():
        job = read_job(args)
        rnn.check(job, args.max_restarts)
        on = training.read_engine(args)
    options = {"max_restarts": args.max_restarts, "on_restart": _print_restart}
    options |= {"deadline": math.inf, "on_report": training.log}
    histories = rnn.run(job, on=on, **options)
    # Only torch RPC's bytes can be counted: other engines' sockets carry much besides.
    wire = rnn.traffic.measured_bytes(job) if args.engine == "rpc" else math.nan
    training.check_finite(histories[0].perplexity)
    found = _found(job, histories, wire)
    repeat = partial(rnn.run_locally, replace(job, keep=None))
    found["max_parameter_difference"] = training.difference(
        args.against_local, histories[0].weights, repeat
    )
    common.write_json(args.json, found)
    print(
        f"validation perplexity {found['valid_perplexity']:.1f}, "
        f"bigram model {found['baseline_perplexity']:.1f}; "
        f"{found['tokens_per_second']:.0f} tokens/s"
        + (f", {wire:.0f} bytes a step" if math.isfinite(wire) else "")
    )


def read_job(args: argparse.Namespace) -> Job:
    """The job that the flags describe; ValueError if it is impossible."""
    config = training.read_config(args, RNNConfig, SMOKE)
    if args.against_local and not args.sync:
        raise ValueError("asynchronous trainers have no equal in one process")
    _check_checkpoint(args.checkpoint, args.json)
    kept = args.checkpoint if torchrun.restarts() else None
    start = kept if kept and kept.exists() else args.resume
    resume = start and rnn.checkpoint.load(start)
    if args.corpus == "grammar":
        corpus = data.Grammar(seed=args.seed).corpus(*GRAMMAR_TOKENS)
    else:
        corpus = data.load_corpus(args.corpus)
    return Job(config, corpus, resume, args.checkpoint and args.checkpoint.absolute())


def _check_checkpoint(file: Path | None, results: Path | None) -> None:
    """Refuse, by a ValueError, to overwrite a file that is not a checkpoint."""
    if file is None or not torchrun.is_first():
        return
    if results is not None and file.resolve() == results.resolve():
        raise ValueError(f"--checkpoint and --json are both {str(file)!r}")
    if file.exists() and file.stat().st_size:
        try:
            rnn.checkpoint.load(file)
        except ValueError as error:
            raise ValueError(f"{error}; to keep another there, remove it") from error


def _found(job: Job, histories: Sequence[History], wire: float) -> dict[str, Any]:
    """The results for the JSON file: losses in nats, times in seconds."""
    first, vocab_size = histories[0], len(job.corpus.vocabulary)
    found = {
        "train_loss": first.progress[-1].train_loss,
        "valid_perplexity": first.perplexity,
        "baseline_perplexity": data.ngram_perplexity(job.corpus, 2),
        "unigram_perplexity": data.ngram_perplexity(job.corpus, 1),
        # No token is read, in no time, if the checkpoint was of a complete run.
        "tokens_per_second": sum(h.tokens for h in histories) / (first.seconds or 1),
        "bytes_per_step": wire if math.isfinite(wire) else None,
        "expected_bytes_per_step": rnn.traffic.expected_bytes(job.config, vocab_size),
        "seconds": first.seconds,
        "steps": len(first.losses),
        "losses": [history.losses for history in histories],
        "staleness": [history.staleness for history in histories],
    }
    if first.projected is not None:  # norms, after each step and at the end
        found["feasibility"] = {
            "weight": [each.weight for each in first.feasibility],
            "mapped": [each.mapped for each in first.feasibility],
        }
        found["projected_perplexity"] = first.projected.score.perplexity
        found["projected_feasibility"] = first.projected.feasibility.weight
    return found


def _print_restart(error: WorkerLost, job: Job) -> None:
    place = "from the start"
    if job.resume is not None:
        place = f"from pass {job.resume.epoch + 1}, window {job.resume.window}"
    print(f"{error.headline}: all begin again {place}", flush=True)
