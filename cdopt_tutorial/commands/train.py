"""The command of every system; `SYSTEMS` has a row for what differs."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from cdopt_tutorial import data, torchrun
from cdopt_tutorial.commands import Failed, check_writable, read_flags, write_json
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.training import Progress

GRAMMAR_TOKENS = 100_000, 20_000  # to train on, to validate on
# Where a config has them.
LIKE_ONE_PROCESS = {"dtype": "float64", "dropout": 0.0, "gather": True}


@dataclass(frozen=True)
class Flags:
    """The flags of all systems, besides the fields of their configs."""

    smoke: bool = False  #: a run of seconds, to see that it works
    json: Path | None = None  #: write the results to this file
    #: repeat the run in one process and compare the weights; where there is a choice,
    #: in float64 and with no dropout
    against_local: bool = False
    engine: str = "rpc"  #: what starts the workers, and carries calls: rpc or ray
    #: of a cluster of Ray, host:port or auto; by default one is started
    address: str | None = None
    #: that workers listen on under torchrun, such as eth0; by default the one that
    #: leads to the first host
    interface: str | None = None


@dataclass(frozen=True)
class RNNFlags(Flags):
    """Those of the RNN."""

    corpus: str | None = None  #: a file with a text, or the word grammar
    checkpoint: Path | None = None  #: keep checkpoints in this file
    resume: Path | None = None  #: go on from this checkpoint
    #: restart from the checkpoint when a worker dies, at most so many times
    max_restarts: int = 0


def run(name: str, arguments: list[str]) -> int:
    """Train, compare with one process, print and write; 1 if a task was not solved.

    Lists and tables are in the file of --json only.
    """
    row = SYSTEMS[name]
    system = import_module(f"cdopt_tutorial.{row.folder}")  # no other: that takes time
    config, flags, options = read(name, system, arguments)
    figures, weights, repeat = row.train(system, config, flags, options)
    check_finite(figures.get("valid_perplexity", 0.0))
    compared = flags.against_local and torchrun.is_first()
    gap = max_difference(weights, repeat().weights) if compared else None
    figures["max_parameter_difference"] = gap
    for figure, value in figures.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        if isinstance(value, str | int):
            print(f"{figure:26} {value}")
    write_json(flags.json, figures)
    return 0 if flags.smoke or figures.get("solved", True) else 1


def read(name: str, system: Any, arguments: list[str]) -> tuple[Any, Any, dict]:
    """The config and the flags of a command, and the options of ``launch``."""
    row = SYSTEMS[name]
    flags: type = row.flags
    config: type = getattr(system, row.config)

    @dataclass(frozen=True)
    class Unchecked(flags, config):
        def __post_init__(self):
            pass

    given = read_flags(name, Unchecked, arguments)
    check_writable(given.json)
    values = {field.name: getattr(given, field.name) for field in fields(config)}
    if given.against_local:
        if values.get("semantics") == "original":
            raise ValueError("semantics original has no equal in one process")
        if values.get("sync") is False:
            raise ValueError("asynchronous trainers have no equal in one process")
        values |= {n: v for n, v in LIKE_ONE_PROCESS.items() if n in values}
    if given.smoke:
        values |= row.smoke
    if given.interface is not None:
        os.environ[torchrun.INTERFACE] = given.interface
    on = given.engine if given.address is None else f"{given.engine}:{given.address}"
    return config(**values), given, {"on": on, "deadline": math.inf}


def train(system: Any, config: Any, flags: Flags, options: dict) -> tuple:
    """Train on a job that follows from the config, or is the config, as for games.

    Returns figures, all parameters by name, and how one process repeats the run.
    """
    job = system.Job(config) if hasattr(system, "Job") else config
    result = system.run(job, on_report=partial(log, config), **options)
    # One process repeats what was played ahead by its schedule.
    by = [result.schedule] if hasattr(result, "schedule") else []
    return result.figures(), result.weights, partial(system.run_locally, job, *by)


def train_sharded(sharding: Any, config: Any, flags: Flags, options: dict) -> tuple:
    """Train on chapter 2's text, and measure on this host."""
    job = sharding.Job(config)
    result = sharding.run(job, **options)
    figures = sharding.costs.figures(job, result)
    return figures, result.weights, partial(sharding.run_locally, job)


def train_rnn(rnn: Any, config: Any, flags: RNNFlags, options: dict) -> tuple:
    """Train and evaluate, as often as workers may die."""
    job = rnn_job(rnn, config, flags)
    trainers = rnn.run(
        job, max_restarts=flags.max_restarts, on_report=partial(log, config),
        on_restart=lambda error, _: print(
            f"{error.headline}: all begin again", flush=True
        ),
        **options,
    )  # fmt: skip
    # Only torch RPC's bytes can be counted: other engines' sockets carry much besides.
    figures = rnn.traffic.figures(job, trainers, counted=flags.engine == "rpc")
    repeat = partial(rnn.run_locally, replace(job, keep=None))
    return figures, trainers[0].weights, repeat


def rnn_job(rnn: Any, config: Any, flags: RNNFlags) -> Any:
    """The job, with its text and the checkpoint that it goes on from."""
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
    return rnn.Job(config, corpus, resume, keep and keep.absolute())


def log(config: Any, _: str, note: Any) -> None:
    """Print a line after each epoch, or every few rounds of episodes."""
    if isinstance(note, Progress):
        score = note.valid  # checked, too: infinite weights can't be projected
        check_finite(note.train_loss + (score.loss if score else 0))
        if score is not None:
            accuracy, perplexity = score.accuracy, f"perplexity {score.perplexity:.1f}"
            valid = perplexity if accuracy is None else f"accuracy {accuracy:.3f}"
            line = f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}"
            print(f"{line}\tvalidation {valid}", flush=True)
    elif note.number % config.log_interval == 0:
        last = f"Episode {note.episodes}\tLast reward: {note.last_reward:.2f}"
        print(f"{last}\tAverage reward: {note.mean_reward:.2f}", flush=True)


def check_finite(loss: float) -> None:
    """End a training that diverged."""
    if not math.isfinite(loss):
        raise Failed(
            "the training diverged; lower --lr, or --penalty-param if it is above 1"
        )


class System(NamedTuple):
    """A row of `SYSTEMS`: where the system is, and what its command does with it."""

    folder: str  #: in the package
    config: str  #: the class of its settings there
    smoke: dict[str, int]  #: settings of a smoke run
    #: trains by the system's folder, a config, flags and options of ``launch``
    train: Callable[[Any, Any, Any, dict], tuple] = train
    flags: type[Flags] = Flags  #: besides the config's fields


SHARD_SMOKE = {"max_steps": 10, "width": 16, "seq_len": 8}
SYSTEMS = {
    "reinforce": System("reinforce", "ReinforceConfig", {"max_episodes": 40}),
    "rnn": System(
        "parameter_server", "RNNConfig", {"max_steps": 30}, train_rnn, RNNFlags
    ),
    "hybrid": System("hybrid", "HybridConfig", {"max_steps": 30}),
    "shard": System("sharding", "ShardConfig", SHARD_SMOKE, train_sharded),
    "rollouts": System("rollouts", "RolloutsConfig", {"max_episodes": 128}),
}
