"""`cdopt-tutorial rnn`: train a language model on a parameter server."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cdopt_tutorial.commands.common import (
    JsonFile,
    add_against_local,
    add_run_options,
    bad_input,
    check_writable,
    diverged,
    named_failure,
    told,
)

SMOKE_STEPS = 30
GRAMMAR = "grammar"
GRAMMAR_TOKENS = 100_000, 20_000


def add(commands) -> None:
    """Add the parser."""
    parser = commands.add_parser(
        "rnn", help="chapter 2: train an RNN split over a trainer and a server"
    )
    option = parser.add_argument
    option("--cut", default="loss", help="logits or loss (default: loss)")
    option("--num-trainers", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--sync", action=argparse.BooleanOptionalAction, default=True)
    option("--async", dest="sync", action="store_false", help="the same as --no-sync")
    option("--corpus", metavar="FILE", help="a text, or the word grammar")
    option("--embedding", type=int, default=128, metavar="N", help="default: 128")
    option("--hidden", type=int, default=128, metavar="N", help="default: 128")
    option("--num-layers", type=int, default=1, metavar="N", help="default: 1")
    option("--dropout", type=float, default=0.4, metavar="P", help="default: 0.4")
    option("--seq-len", type=int, default=35, metavar="N", help="default: 35")
    option("--batch-size", type=int, default=20, metavar="N", help="default: 20")
    option("--optimizer", default="adam", help="sgd or adam (default: adam)")
    option("--lr", type=float, default=4e-3, help="default: 0.004")
    option("--lr-decay", type=float, default=0.9, help="factor after an epoch")
    option("--clip", type=float, default=1.0, help="largest norm of the gradient")
    option("--manifold", default="none", help="stiefel, oblique or none")
    option("--where", default="trainer", help="whose weights: trainer or server")
    option("--per-gate", action="store_true", help="each gate of the LSTM on its own")
    option("--penalty", type=float, default=1.0, metavar="P", help="default: 1.0")
    option("--epochs", type=int, default=6, metavar="N", help="default: 6")
    option("--max-steps", type=int, metavar="N", help="stop after these")
    option("--checkpoint", type=Path, metavar="FILE", help="keep checkpoints here")
    option(
        "--save-every", type=int, default=50, metavar="N", help="steps (default: 50)"
    )
    option("--resume", type=Path, metavar="FILE", help="go on from this checkpoint")
    add_against_local(parser, without=" and without dropout")
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, evaluate, and compare; 1 if the training diverged."""
    from cdopt_tutorial import parameter_server as rnn

    with bad_input():
        job = _job(args)
        rnn.check(job)
        results = JsonFile(args.json)
    with named_failure():
        histories = rnn.run(job, deadline=float("inf"), on_report=_log)
        wire = rnn.traffic.measured_bytes(job)
    if not math.isfinite(histories[0].perplexity):
        return diverged()
    found = _found(job, histories, wire)
    if args.against_local:
        found["max_parameter_difference"] = _difference(job, histories[0].weights)
    results.write(found)
    print(
        f"validation perplexity {found['valid_perplexity']:.1f}, "
        f"bigram model {found['baseline_perplexity']:.1f}; "
        f"{found['tokens_per_second']:.0f} tokens/s, {wire:.0f} bytes a step"
    )
    return 0


def _found(job, histories, wire: float) -> dict[str, Any]:
    """What goes into the JSON; losses in nats, times in seconds."""
    from cdopt_tutorial import parameter_server as rnn
    from cdopt_tutorial.data import bigram_perplexity, unigram_perplexity

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


def _constrained(history) -> dict[str, Any]:
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


def _difference(job, weights: Mapping[str, Any]) -> float:
    """Largest difference of any parameter from the same training in one process."""
    from cdopt_tutorial import parameter_server as rnn

    local = rnn.run_locally(replace(job, keep=None)).weights
    return told(max((weights[n] - w).abs().max().item() for n, w in local.items()))


def _job(args: argparse.Namespace):
    """The job that the options describe.

    Raises:
        ValueError: an option is out of its range, or a file does not fit.
        OSError: the checkpoint can't be written.
    """
    from cdopt_tutorial.data import Grammar, load_corpus
    from cdopt_tutorial.parameter_server import Job, RNNConfig, checkpoint

    config = RNNConfig(
        cut=args.cut,
        num_trainers=args.num_trainers,
        sync=args.sync,
        embedding=args.embedding,
        hidden=args.hidden,
        num_layers=args.num_layers,
        dropout=0.0 if args.against_local else args.dropout,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        optimizer=args.optimizer,
        lr=args.lr,
        lr_decay=args.lr_decay,
        clip=args.clip,
        manifold=args.manifold,
        where=args.where,
        per_gate=args.per_gate,
        penalty_param=args.penalty,
        epochs=args.epochs,
        max_steps=SMOKE_STEPS if args.smoke else args.max_steps,
        save_every=args.save_every,
        seed=args.seed,
        dtype="float64" if args.against_local else "float32",
    )
    if args.device not in ("auto", "cpu"):
        raise ValueError(f"device is {args.device!r}, but the rnn is for the cpu only")
    if args.against_local and not args.sync:
        raise ValueError("asynchronous trainers have no equal in one process")
    if args.checkpoint is not None:
        check_writable(args.checkpoint)
    resume = None if args.resume is None else checkpoint.load(args.resume)
    if args.corpus == GRAMMAR:
        corpus = Grammar(seed=args.seed).corpus(*GRAMMAR_TOKENS)
    else:
        corpus = load_corpus(args.corpus)
    return Job(config, corpus, resume, args.checkpoint and args.checkpoint.absolute())


def _log(_, note) -> None:
    if note.valid_loss is not None:
        print(
            f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}\t"
            f"validation perplexity {note.perplexity:.1f}",
            flush=True,
        )
