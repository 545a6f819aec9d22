"""The training loop, and the roles that run it: on workers, or in one process."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from cdopt_tutorial.constraints import Constraints, Feasibility
from cdopt_tutorial.data import Corpus, Stream
from cdopt_tutorial.engines import Role, launch, report, serve
from cdopt_tutorial.engines.remote import LocalRef
from cdopt_tutorial.parameter_server import checkpoint
from cdopt_tutorial.parameter_server.checkpoint import Checkpoint
from cdopt_tutorial.parameter_server.config import RNNConfig
from cdopt_tutorial.parameter_server.model import (
    Hidden,
    PulledRecurrence,
    RNNModel,
    build,
)
from cdopt_tutorial.parameter_server.server import part_of, shared_server
from cdopt_tutorial.parameter_server.steps import (
    PARTS,
    DistributedStep,
    LocalStep,
    SharedStep,
    gather,
)

SERVER = "ps"
REPORT_EVERY = 10  # steps

Step = LocalStep | DistributedStep | SharedStep


@dataclass(frozen=True)
class Job:
    """What is to be trained on what, from where, and what is kept of it.

    Attributes:
        config: of the run.
        corpus: what is read.
        resume: where to go on; None to begin.
        keep: file for checkpoints; None keeps none.
    """

    config: RNNConfig
    corpus: Corpus
    resume: Checkpoint | None = None
    keep: Path | None = None


@dataclass(frozen=True)
class Progress:
    """What a trainer reports every few steps, and after each epoch.

    Attributes:
        trainer: number of the trainer.
        epoch: from 1.
        step: steps that this trainer has taken.
        tokens: tokens that it has read in this run.
        seconds: that its steps took in this run.
        train_loss: mean of its own tokens over the last steps, nats.
        valid_loss: mean of the validation part, nats; None within an epoch.
        staleness: mean steps that others took between its reading and its writing.
    """

    trainer: int
    epoch: int
    step: int
    tokens: int
    seconds: float
    train_loss: float
    valid_loss: float | None
    staleness: float

    @property
    def perplexity(self) -> float | None:
        """Of the validation part; None within an epoch."""
        return None if self.valid_loss is None else perplexity(self.valid_loss)


@dataclass(frozen=True)
class Projected:
    """What it costs to make a trained model exactly feasible.

    Attributes:
        valid_loss: mean of the validation part after the projection, nats.
        feasibility: after the projection.
    """

    valid_loss: float
    feasibility: Feasibility

    @property
    def perplexity(self) -> float:
        """Of the validation part after the projection."""
        return perplexity(self.valid_loss)


@dataclass
class History:
    """What one trainer returns.

    Attributes:
        progress: all that it reported.
        losses: mean loss of each step, nats, of its own tokens; those before a
            resumed checkpoint included.
        staleness: of each step of this run.
        tokens: that it has read in this run.
        step_seconds: of each step of this run.
        feasibility: of the constrained weights after each step of this run; the first
            trainer's only.
        projected: what the projection at the end came to; None without constraints.
        weights: all parameters by name, before the projection; the first trainer's
            only.
    """

    progress: list[Progress] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    tokens: int = 0
    step_seconds: list[float] = field(default_factory=list)
    feasibility: list[Feasibility] = field(default_factory=list)
    projected: Projected | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Of the validation part at the end, before the projection."""
        return self.progress[-1].perplexity

    @property
    def seconds(self) -> float:
        """What all steps of this run took, without evaluation."""
        return sum(self.step_seconds)


def run(job: Job, **options: Any) -> list[History]:
    """Train on workers: ``ps`` and the trainers.

    Args:
        job: what to train.
        options: of :func:`~cdopt_tutorial.engines.launch.launch`, for instance
            ``on_report``, which gets each :class:`Progress`.

    Returns:
        What each trainer returned, in their order.

    Raises:
        ValueError: the text is too short, or the checkpoint does not fit.
        WorkerError: a worker failed.
    """
    check(job)
    cores, num_trainers = psutil.cpu_count(), job.config.num_trainers
    threads = max(1, cores // num_trainers)
    roles = {SERVER: Role(serve, num_threads=cores)}
    trainers = [f"trainer{rank}" for rank in range(num_trainers)]
    for rank, name in enumerate(trainers):
        roles[name] = Role(run_trainer, (job, rank), num_threads=threads)
    options.setdefault("polling", False)  # while one worker computes, others wait
    options.setdefault("rpc_timeout", 0)  # the launcher notices who is gone
    results = launch(roles, **options)
    return [results[name] for name in trainers]


def check(job: Job) -> None:
    """Refuse a job that can't be done.

    Raises:
        ValueError: the text is too short, or the checkpoint does not fit.
    """
    train, _ = (
        Stream(part, job.config.seq_len, job.config.batch_size)
        for part in (job.corpus.train, job.corpus.valid)
    )
    if job.resume is not None:
        job.resume.fits(job.config, job.corpus.vocabulary.words)
        if job.resume.window >= len(train):
            raise ValueError(
                f"the checkpoint is of another text: {job.resume.window} windows of a "
                f"pass are done, but this one has {len(train)}"
            )


def run_locally(job: Job) -> History:
    """The same training in this process: one trainer with the whole batch."""
    check(job)
    vocab_size = len(job.corpus.vocabulary)
    refs = {name: LocalRef(build(name, vocab_size, job.config)) for name in PARTS}
    rnn = refs["rnn"].local_value()
    model = RNNModel(refs["embedding"], refs["decoder"], rnn, job.config)
    alone = replace(job, config=replace(job.config, num_trainers=1))
    return fit(model, LocalStep(refs, job.config), 0, alone, lambda _: None)


def run_trainer(job: Job, trainer: int) -> History:
    """A trainer's role."""
    if job.config.num_trainers == 1:
        return _train_split(job)
    return _train_shard(job, trainer)


def _train_split(job: Job) -> History:
    """One trainer: it owns the LSTM, the server owns the rest, as in the original."""
    config, vocab_size = job.config, len(job.corpus.vocabulary)
    refs = {
        name: rpc.remote(SERVER, build, args=(name, vocab_size, config))
        for name in ("embedding", "decoder")
    }
    rnn = build("rnn", vocab_size, config)
    model = RNNModel(refs["embedding"], refs["decoder"], rnn, config)
    step = DistributedStep(refs | {"rnn": rpc.RRef(rnn)}, model, config)
    return fit(model, step, 0, job, report)


def _train_shard(job: Job, trainer: int) -> History:
    """One of several trainers: the server owns everything, and is shared by name.

    No RRef is handed from trainer to trainer: each would be one more user of it, to be
    confirmed by its owner before anybody may leave.
    """
    vocab_size = len(job.corpus.vocabulary)
    server = rpc.rpc_sync(SERVER, shared_server, args=(vocab_size, job.config))
    refs = {name: rpc.remote(SERVER, part_of, args=(server, name)) for name in PARTS}
    rnn = PulledRecurrence(refs["rnn"], job.config)
    model = RNNModel(refs["embedding"], refs["decoder"], rnn, job.config)
    step = SharedStep(refs, server, trainer, job.config)
    return fit(model, step, trainer, job, report)


def fit(
    model: RNNModel,
    step: Step,
    trainer: int,
    job: Job,
    tell: Callable[[Progress], None],
) -> History:
    """The training loop of one trainer.

    Args:
        model: as this trainer sees it.
        step: how its losses move the parameters.
        trainer: its number; the first one evaluates and keeps checkpoints.
        job: what to train; each trainer takes its own columns.
        tell: called every few steps, and after each epoch.
    """
    loop = _Loop(model, step, trainer, job, tell)
    config, resume = job.config, job.resume
    if resume is not None:
        step.load(resume.weights, resume.optimizer)
    epoch, begun = (resume.epoch, resume.window) if resume else (0, 0)
    if epoch >= config.epochs or loop.finished:  # all was done before
        loop.look(max(0, epoch - (begun == 0)))
    while epoch < config.epochs and not loop.finished:
        loop.epoch(epoch, begun)
        epoch, begun = epoch + 1, 0
    if trainer == 0:
        loop.history.weights = gather(step.refs)
    if loop.constraints is not None:
        loop.project()
    return loop.history


class _Loop:
    """What one trainer's loop carries from step to step."""

    def __init__(self, model, step, trainer: int, job: Job, tell):
        config = job.config
        stream = Stream(job.corpus.train, config.seq_len, config.batch_size)
        self._stream = stream.shard(trainer, config.num_trainers)
        self._model, self._step, self._trainer = model, step, trainer
        self._job, self._config, self._tell = job, config, tell
        self._limit = config.max_steps or config.epochs * len(stream)
        held = config.constrained is not None
        self.constraints = Constraints(*step.refs.values()) if held else None
        self.history = History()
        if job.resume is not None:
            self.history.losses = job.resume.losses_of(trainer, config.num_trainers)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return len(self.history.losses) >= self._limit

    def epoch(self, epoch: int, begun: int) -> None:
        """One pass over the text, from a window on, and what is told and kept of it."""
        self._step.set_lr(self._config.lr * self._config.lr_decay**epoch)
        self._model.train()
        hidden, done = self._hidden(begun), begun
        self._begin_anew()
        for window, (tokens, targets) in enumerate(self._stream.windows(begun), begun):
            if self.finished:
                break
            if window > begun and window % self._config.save_every == 0:
                self._keep(epoch, window, hidden)
                self._begin_anew()
            hidden, done = self._one(tokens, targets, hidden), window + 1
            if len(self.history.losses) % REPORT_EVERY == 0:
                self._note(epoch, None)
        self.look(epoch)
        if done == len(self._stream):
            epoch, done = epoch + 1, 0
            hidden = self._model.start(self._stream.batch_size)
        self._keep(epoch, done, hidden)

    def look(self, epoch: int) -> None:
        """Evaluate, and tell of it; all trainers wait for the first one."""
        self._step.meet()
        valid = evaluate(self._model, self._job) if self._trainer == 0 else None
        self._note(epoch, valid)
        # Whoever went on would switch the server's dropout on in its midst.
        self._step.meet()

    def project(self) -> None:
        """Make the model exactly feasible, once all trainers have done their steps."""
        self._step.meet()
        if self._trainer == 0:
            self.constraints.project_()
            loss = evaluate(self._model, self._job)
            self.history.projected = Projected(loss, self.constraints.feasibility())

    def _hidden(self, begun: int) -> Hidden:
        """Where this trainer's columns stand: zeros, unless a pass is resumed."""
        if begun == 0:
            return self._model.start(self._stream.batch_size)
        parts = (
            state.tensor_split(self._config.num_trainers, dim=1)[self._trainer]
            for state in self._job.resume.hidden
        )
        return tuple(part.contiguous() for part in parts)

    def _begin_anew(self) -> None:
        # All trainers, since the server's chance is everybody's.
        self._step.meet()
        self._step.reseed(1000 * self._config.seed + 10 * len(self.history.losses))
        self._step.meet()

    def _one(self, tokens: Tensor, targets: Tensor, hidden: Hidden) -> Hidden:
        """One step on one window; returns the hidden state for the next one."""
        # Together the trainers have the joint batch's tokens, so the sum of what they
        # leave is the gradient of its mean. Alone, each has only its own.
        columns = self._config.batch_size if self._config.sync else targets.shape[1]
        carried: list = []

        def loss_of() -> Tensor:
            total, last = self._model.loss(tokens, targets, hidden)
            carried.extend((total.item() / targets.numel(), last))
            return total / (len(targets) * columns) + self._penalty()

        begin = time.perf_counter()
        self.history.staleness.append(self._step(loss_of))
        self.history.step_seconds.append(time.perf_counter() - begin)
        self.history.tokens += targets.numel()
        self.history.losses.append(carried[0])
        if self.constraints is not None and self._trainer == 0:
            self.history.feasibility.append(self.constraints.feasibility())
        return tuple(state.detach() for state in carried[1])

    def _penalty(self) -> Tensor | float:
        """The penalty on constrained weights; once for each step that is taken."""
        if self.constraints is None or (self._config.sync and self._trainer > 0):
            return 0.0
        return self.constraints.penalty()

    def _keep(self, epoch: int, window: int, hidden: Hidden) -> None:
        """Write a checkpoint, all trainers together; the first one writes."""
        if self._job.keep is None:
            return
        met = self._step.meet((hidden, self.history.losses))
        all_hidden, all_losses = zip(*met, strict=True)
        if self._trainer == 0:
            state = checkpoint.make(
                self._config,
                self._job.corpus.vocabulary.words,
                weights=gather(self._step.refs),
                optimizer=self._step.optimizer_state(),
                epoch=epoch,
                window=window,
                hidden=tuple(
                    torch.cat(parts, dim=1) for parts in zip(*all_hidden, strict=True)
                ),
                losses=list(all_losses),
            )
            checkpoint.save(self._job.keep, state)
        self._step.meet()

    def _note(self, epoch: int, valid_loss: float | None) -> None:
        history = self.history
        last = slice(-REPORT_EVERY, None)
        losses, stale = history.losses[last], history.staleness[last]
        note = Progress(
            trainer=self._trainer,
            epoch=epoch + 1,
            step=len(history.losses),
            tokens=history.tokens,
            seconds=history.seconds,
            train_loss=sum(losses) / max(1, len(losses)),
            valid_loss=valid_loss,
            staleness=sum(stale) / max(1, len(stale)),
        )
        history.progress.append(note)
        self._tell(note)


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is too large to write."""
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def evaluate(model: RNNModel, job: Job) -> float:
    """Mean loss of the validation part, in nats a token, without dropout."""
    model.eval()
    stream = Stream(job.corpus.valid, job.config.seq_len, job.config.batch_size)
    hidden, total = model.start(stream.batch_size), 0.0
    for tokens, targets in stream.windows():
        loss, hidden = model.loss(tokens, targets, hidden)
        total += loss.item()
    return total / stream.num_tokens
