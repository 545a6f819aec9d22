"""The system: what an owner of parameters does, what a trainer does, and how they run.

With one trainer there are two owners, as in the original: ``ps`` owns the embedding and
the decoder, the trainer its LSTM. With several, ``ps`` owns everything.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from joblib import cpu_count
from torch import Tensor, nn
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from cdopt_tutorial import checks
from cdopt_tutorial.calls import alone, gradients, reference, remote
from cdopt_tutorial.calls.device import device_for, weights_of
from cdopt_tutorial.calls.errors import WorkerError, WorkerLost
from cdopt_tutorial.calls.gradients import Context
from cdopt_tutorial.calls.references import Ref, Reference
from cdopt_tutorial.calls.rendezvous import Rendezvous, all_that_was_brought
from cdopt_tutorial.calls.steps import clip_factor, make_optimizer, move, squared_norm
from cdopt_tutorial.constraints import Constraints
from cdopt_tutorial.data import Corpus, Stream
from cdopt_tutorial.parameter_server import checkpoint
from cdopt_tutorial.parameter_server.model import (
    PARTS,
    Hidden,
    History,
    RNNConfig,
    RNNModel,
    build_all,
    build_own,
)
from cdopt_tutorial.run import Role, launch, report, serve, span
from cdopt_tutorial.training import Progress, Projected, Score, check_begin

SERVER = "ps"
REPORT_EVERY = 10  # steps


@dataclass(frozen=True)
class Job:
    """What to train, on which text, and from and to which checkpoint."""

    config: RNNConfig  #: of the run
    corpus: Corpus  #: to train and validate on
    resume: checkpoint.Checkpoint | None = None  #: to resume from; None to begin
    keep: Path | None = None  #: file to keep checkpoints in; None keeps none
    #: some or all of the initial parameters, by name, instead of those of the seed;
    #: ignored by a resumed run.
    begin: Mapping[str, Tensor] = field(default_factory=dict)


class Owner:
    """Parts of the model, on the worker that owns them, and their optimizer."""

    def __init__(self, parts: Mapping[str, Reference], config: RNNConfig):
        self._parts = nn.ModuleDict({n: ref.local_value() for n, ref in parts.items()})
        self._optimizer = make_optimizer(self._parts.parameters(), config)
        self._clip = config.clip
        self._steps = 0
        self._lock = threading.Lock()
        trainers = range(config.num_trainers)
        self._together = Rendezvous(self._step_for_all, trainers)
        self._barrier = Rendezvous(all_that_was_brought, trainers)

    def version(self) -> int:
        """How many steps these parameters have taken in this run."""
        return self._steps

    def squared_norm(self, context: Context) -> float:
        """‖g‖² of a context's gradients of these parameters."""
        with self._lock:
            grads = gradients.gradients(context, self._parts.parameters())
            return squared_norm(grads.values())

    def step(self, context: Context, scale: float) -> int:
        """Step at once, by a context's gradients; the version that was moved."""
        return self._move([context], scale)

    def step_together(self, trainer: int, context: Context) -> Future[int]:
        """Step by the clipped sum of all trainers' gradients, once all are here."""
        return self._together.enter(trainer, context)

    def _step_for_all(self, contexts: dict[int, Context]) -> dict[int, int]:
        return dict.fromkeys(contexts, self._move(contexts.values(), None))

    def _move(self, contexts: Iterable[Context], scale: float | None) -> int:
        with self._lock:
            grads = gradients.take_sum(contexts, self._parts.parameters())
            if scale is None:  # of trainers in step, whose sum is known here
                scale = clip_factor(squared_norm(grads.values()), self._clip)
            if scale < 1:
                grads = {p: gradient * scale for p, gradient in grads.items()}
            move(self._optimizer, grads)
            self._steps += 1
            return self._steps - 1

    def barrier(self, trainer: int, brought: Any = None) -> Future[list]:
        """What every trainer brought, once all are here."""
        return self._barrier.enter(trainer, brought)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def reseed(self, seed: int) -> None:
        """Reseed this worker's random streams."""
        torch.manual_seed(seed)

    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters on the CPU, by name."""
        return weights_of(self._parts)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state on the CPU, by the parameters' names."""
        names = [name for name, _ in self._parts.named_parameters()]
        states = self._optimizer.state_dict()["state"].items()
        return {names[i]: tree_map_only(Tensor, Tensor.cpu, s) for i, s in states}

    def load(self, weights: Mapping[str, Tensor], states: Mapping[str, dict]) -> None:
        """Load what is given, by name, into these parameters and their optimizer."""
        self._parts.load_state_dict(weights, strict=False)
        whole, names = self._optimizer.state_dict(), self._parts.named_parameters()
        whole["state"] = {i: states[n] for i, (n, _) in enumerate(names) if n in states}
        self._optimizer.load_state_dict(deepcopy(whole))  # torch keeps the tensors


def make_all(job: Job) -> tuple[dict[str, Ref], list[Ref]]:
    """References to the parts and to all owners; the same for every trainer."""
    config, number = job.config, job.config.num_trainers
    of, parts = (len(job.corpus.vocabulary), config), {}
    for name in PARTS if number > 1 else ("embedding", "decoder"):
        parts[name] = remote(SERVER, build_own, name, *of, number, name=name)
    owners = [remote(SERVER, Owner, parts, config, name="owner")]
    if number == 1:
        here = {"rnn": reference(build_own("rnn", *of, 0))}
        owners.append(reference(Owner(here, config)))
        parts = parts | here
    return parts, owners


class Trainer:
    """Reads its columns of the text; the first one evaluates and keeps checkpoints."""

    def __init__(self, rank: int, job: Job):
        config = job.config
        self.rank, self.job, self.config = rank, job, config
        parts, self.owners = make_all(job)
        self.model = RNNModel(parts, config, device_for(config.device, rank))
        free = config.constrained is None
        self.constraints = None if free else Constraints(*parts.values())
        stream = Stream(job.corpus.train, config.seq_len, config.batch_size)
        self.stream = stream.shard(rank, config.num_trainers)
        most = config.epochs * len(stream)
        self.max_steps = min(config.max_steps or most, most)
        self.history = History()
        if job.resume is not None:
            self.history.losses = list(job.resume.losses)

    def step(
        self, tokens: Tensor, targets: Tensor, hidden: Hidden
    ) -> tuple[float, int, Hidden]:
        """One step on a window: its mean loss, its staleness and the hidden state."""
        with gradients.context() as context:
            version = self.version()
            with span("forward"):
                loss, mean, hidden = self.loss(tokens, targets, hidden)
            with span("backward"):
                gradients.backward(context, loss)
            with span("optimizer"):
                staleness = self.update(context) - version
        return mean, staleness, tuple(state.detach() for state in hidden)

    def version(self) -> int:
        """How many steps the parameters have taken."""
        if self.config.sync:  # each of them with this trainer
            return len(self.history.staleness)
        return self.owners[0].rpc_sync().version()

    def loss(
        self, tokens: Tensor, targets: Tensor, hidden: Hidden
    ) -> tuple[Tensor, float, Hidden]:
        """What is minimised, the mean loss of a token in nats, and the hidden state."""
        total, hidden = self.model.loss(tokens, targets, hidden)
        # In step, the trainers' gradients add up to that of the joint batch's mean;
        # otherwise each minimises the mean of its own tokens.
        columns = self.config.batch_size if self.config.sync else targets.shape[1]
        loss = total / (len(targets) * columns)
        # The penalty counts once for each step of the parameters.
        if self.constraints and (self.rank == 0 or not self.config.sync):
            loss = loss + self.constraints.penalty().to(loss)
        return loss, total.item() / targets.numel(), hidden

    def update(self, context: Context) -> int:
        """Move all parameters by a context's clipped gradients; the version moved."""
        if self.config.sync and self.config.num_trainers > 1:
            return self.owners[0].rpc_sync().step_together(self.rank, context)
        scale = 1.0
        if self.config.clip is not None:
            squares = [o.rpc_sync().squared_norm(context) for o in self.owners]
            scale = clip_factor(sum(squares), self.config.clip)
        moved = [owner.rpc_sync().step(context, scale) for owner in self.owners]
        return moved[0]

    def train(self) -> History:
        """The whole training, from its start or from a checkpoint."""
        job, resume = self.job, self.job.resume
        if self.rank == 0:
            start = (resume.weights, resume.optimizer) if resume else (job.begin, {})
            self.on_owners("load", *start)
        self.epoch()  # takes no step if the checkpoint is complete
        while not self.finished:
            self.epoch()
        if self.rank == 0:
            self.history.weights = self.gather("weights")
        if self.constraints:
            self.project(self.constraints)
        return self.history

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return len(self.history.losses) >= self.max_steps

    @property
    def place(self) -> tuple[int, int]:
        """Complete passes over the text, and windows of the next one that are done."""
        return divmod(len(self.history.losses), len(self.stream))

    def epoch(self) -> None:
        """One pass over the text, or the rest of one; then evaluate and save."""
        epoch, first = self.place
        self.on_owners("set_lr", self.config.lr * self.config.lr_decay**epoch)
        self.model.train()
        hidden = self.hidden(first)
        self.reseed()
        for window, texts in enumerate(self.stream.windows(first), start=first):
            if self.finished:
                break
            if window > first and window % self.config.save_every == 0:
                self.keep(hidden)
                self.reseed()
            hidden = self.record(*texts, hidden)
            if len(self.history.losses) % REPORT_EVERY == 0:
                self.report(None)
        self.look()
        self.keep(hidden)

    def record(self, tokens: Tensor, targets: Tensor, hidden: Hidden) -> Hidden:
        """Take a step and record it in the history; the hidden state after it."""
        start, history = time.perf_counter(), self.history
        mean, staleness, hidden = self.step(tokens, targets, hidden)
        history.step_seconds.append(time.perf_counter() - start)
        history.losses.append(mean)
        history.staleness.append(staleness)
        history.tokens += targets.numel()
        if self.constraints and self.rank == 0:
            history.feasibility.append(self.constraints.feasibility())
        return hidden

    def hidden(self, window: int) -> Hidden:
        """The state of this trainer's columns: zeros where a pass begins."""
        if window == 0 or not (resume := self.job.resume):
            return self.model.start(self.stream.batch_size)
        number = self.config.num_trainers
        parts = (state.tensor_split(number, dim=1) for state in resume.hidden)
        return tuple(part[self.rank].contiguous() for part in parts)

    def reseed(self) -> None:
        """Reseed the dropout's random streams, on all workers at once."""
        seed = 1000 * self.config.seed + 10 * len(self.history.losses)
        self.barrier()
        if self.rank == 0:
            self.owners[0].rpc_sync().reseed(seed + 1)
        torch.manual_seed(seed + 2 * self.rank)  # in one process this one counts
        self.barrier()

    def barrier(self, brought: Any = None) -> list:
        """Wait for all trainers: what each brought."""
        return self.owners[0].rpc_sync().barrier(self.rank, brought)

    def on_owners(self, method: str, *args: Any) -> list:
        """Call a method of every owner."""
        return [getattr(owner.rpc_sync(), method)(*args) for owner in self.owners]

    def gather(self, method: str) -> dict[str, Any]:
        """What all owners return, by the parameters' names."""
        of_owners = self.on_owners(method)
        return {name: value for part in of_owners for name, value in part.items()}

    def look(self) -> None:
        """Evaluate and report; all trainers wait for the first one."""
        self.barrier()
        valid = self.job.corpus.valid
        self.report(evaluate(self.model, valid) if self.rank == 0 else None)
        # Another trainer's next step would switch the server's dropout back on.
        self.barrier()

    def project(self, constraints: Constraints) -> None:
        """Make the model exactly feasible once all trainers have taken their steps."""
        self.barrier()
        if self.rank == 0:
            constraints.project_()
            score = evaluate(self.model, self.job.corpus.valid)
            self.history.projected = Projected(score, constraints.feasibility())

    def keep(self, hidden: Hidden) -> None:
        """Write a checkpoint, which the first trainer gathers from all."""
        if self.job.keep is None:
            return
        share = self.stream.batch_size / self.config.batch_size
        losses = [share * loss for loss in self.history.losses]  # of the joint batch
        brought = *(state.cpu() for state in hidden), losses
        *states, parts = zip(*self.barrier(brought), strict=True)
        if self.rank == 0:
            hidden = tuple(torch.cat(columns, dim=1) for columns in states)
            run = asdict(self.config), list(self.job.corpus.vocabulary.words)
            model = self.gather("weights"), self.gather("optimizer_state")
            losses = [sum(step) for step in zip(*parts, strict=True)]
            state = *run, *model, *self.place, hidden, losses
            try:
                checkpoint.save(self.job.keep, checkpoint.Checkpoint(*state))
            except OSError as error:
                reason = f"can't write {self.job.keep}: {error.strerror}"
                raise WorkerError(f"trainer{self.rank}", reason) from error
        self.barrier()

    def report(self, valid: Score | None) -> None:
        """Report this trainer's progress to the parent process."""
        steps, last = len(self.history.losses), self.history.losses[-REPORT_EVERY:]
        epoch = math.ceil(steps / len(self.stream))
        progress = Progress(epoch, steps, sum(last) / len(last), valid)
        self.history.progress.append(progress)
        report(progress)


@torch.no_grad()
def evaluate(model: RNNModel, valid: Tensor) -> Score:
    """The score of a held-out text; the model stays without dropout."""
    model.eval()
    stream = Stream(valid, model.config.seq_len, model.config.batch_size)
    hidden, total = model.start(stream.batch_size), 0.0
    for tokens, targets in stream.windows():
        loss, hidden = model.loss(tokens, targets, hidden)
        total += loss.item()
    return Score(total / stream.num_tokens)


def train(rank: int, job: Job) -> History:
    """A trainer's role."""
    return Trainer(rank, job).train()


def run(
    job: Job,
    *,
    max_restarts: int = 0,
    on_restart: Callable[[WorkerLost, Job], None] = lambda error, job: None,
    **options: Any,
) -> list[History]:
    """Train on workers, ``ps`` and the trainers: what each trainer returned.

    After the loss of a worker all restart, at most ``max_restarts`` times, from the
    checkpoint that the job keeps; ``on_restart(error, job)`` is called first. The
    options are those of :func:`~.launch.launch`. Raises what :func:`check` does, and a
    WorkerError if a worker failed, or too many were lost.
    """
    check(job, max_restarts)
    while True:
        try:
            return run_once(job, **options)
        except WorkerLost as error:
            if not max_restarts:
                raise
            max_restarts -= 1
            if job.keep and job.keep.exists():  # or it died before the first one
                job = replace(job, resume=checkpoint.load(job.keep))
            on_restart(error, job)


def run_once(job: Job, **options: Any) -> list[History]:
    """One attempt of `run`, without its checks."""
    number = job.config.num_trainers
    threads = max(1, cpu_count() // number)
    roles = {SERVER: Role(serve, num_threads=cpu_count())}
    for rank in range(number):
        roles[f"trainer{rank}"] = Role(train, (rank, job), num_threads=threads)
    results = launch(roles, **options)
    return [results[f"trainer{rank}"] for rank in range(number)]


def run_locally(job: Job) -> History:
    """The same training in this process, by one trainer with the whole batch."""
    whole = replace(job, config=replace(job.config, num_trainers=1))
    check(whole)
    with alone():
        return train(0, whole)


def check(job: Job, max_restarts: int = 0) -> None:
    """Raise ValueError for a job or a number of restarts that is impossible here."""
    if max_restarts < 0:
        raise ValueError(f"max-restarts is {max_restarts}, but must be at least 0")
    if max_restarts and job.keep is None:
        raise ValueError(f"max-restarts is {max_restarts}, which needs a checkpoint")
    config, words = job.config, job.corpus.vocabulary.words
    size = config.seq_len, config.batch_size
    train, _ = Stream(job.corpus.train, *size), Stream(job.corpus.valid, *size)
    rows = train.num_tokens // config.batch_size
    what = f"at most {rows}, a column's tokens in this text"
    checks.check(config, "seq_len", config.seq_len <= rows, what)
    if job.resume is not None:
        job.resume.fits(config, words, len(train))
    if job.begin:
        check_begin(job.begin, build_all(len(words), config).state_dict())
