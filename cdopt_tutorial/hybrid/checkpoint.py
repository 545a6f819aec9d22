"""Save a training, each owner its part, and resume it on any number of workers.

A checkpoint is a folder that all hosts can reach: a file of each server's rows, and one
of the trainers, which is written last. So what has that file is complete.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdopt_tutorial.hybrid.model import Job
from cdopt_tutorial.training import load_whole, save_whole

MAY_CHANGE = (
    "num_trainers", "num_servers", "shares", "epochs", "max_steps", "device", "gather",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What the trainers have, and where the servers' rows are."""

    settings: dict[str, Any]  #: of the run that saved it
    epoch: int  #: complete passes over the data
    dense: dict[str, Any]  #: states of the dense layer and its optimizer
    folder: Path  #: of the files

    def fits(self, job: Job) -> None:
        """Raise ValueError unless a job can go on from it."""
        for name, new in settings_of(job).items():
            if name not in MAY_CHANGE and (old := self.settings[name]) != new:
                raise ValueError(
                    f"the checkpoint has {name} {old!r}, but {new!r} was asked for"
                )


def settings_of(job: Job) -> dict[str, Any]:
    """What decides a training, with the number of rows in its whole table."""
    return vars(job.config) | {"num_tokens": job.data.num_tokens}


def complete(folder: Path, **content: Any) -> None:
    """Complete a checkpoint, and remove older ones; the first trainer does this."""
    save_whole(folder / "trainers.pt", content)
    for other in folder.parent.glob("epoch-*"):
        if other != folder:
            shutil.rmtree(other)


def load(keep: Path) -> Checkpoint:
    """A run's latest complete checkpoint, or that in a folder of its own.

    A ValueError, in one line, if there is none.
    """
    files = [*keep.glob("epoch-[0-9]*/trainers.pt"), *keep.glob("trainers.pt")]
    if not files:
        raise ValueError(f"{str(keep)!r} has no complete checkpoint")
    file = max(files, key=lambda file: int(file.parent.name.removeprefix("epoch-")))
    content = read(file)
    try:
        return Checkpoint(**content, folder=file.parent)
    except TypeError as error:
        raise ValueError(f"{str(file)!r}: another program made it") from error


def read(file: Path) -> dict[str, Any]:
    """What is in a file, tensors as they are used; ValueError if it is damaged."""
    try:
        return load_whole(file, mmap=True)
    except ValueError as error:
        raise ValueError(f"{str(file)!r}: {error}") from error


def save_rows(owner: Any, folder: Path) -> None:
    """Runs on a server: save its rows, and its optimizer's state of them."""
    (weight,), optimizer = owner.parameters, owner.optimizer
    folder.mkdir(parents=True, exist_ok=True)
    state = {"weight": weight.detach()} | optimizer.state[weight]
    save_whole(folder / f"rows-{owner.table.server}.pt", state)


@torch.no_grad()
def load_rows(owner: Any, folder: Path, num_saved: int) -> None:
    """Runs on a server: take its rows from the files that so many servers saved.

    They are read as they are needed, so no server has more than its own.
    """
    (weight,), optimizer, table = owner.parameters, owner.optimizer, owner.table
    state: dict[str, Tensor] = {}
    rows = table.server + table.num_servers * torch.arange(len(weight))
    for other in range(num_saved):
        # Row t of the table is row t // num_saved of the file t mod num_saved.
        here = rows % num_saved == other
        for name, value in read(folder / f"rows-{other}.pt").items():
            if value.ndim == 0:  # a count of steps
                state[name] = value.clone()
                continue
            own = state.setdefault(name, torch.empty_like(weight))
            own[here.to(own.device)] = value[rows[here] // num_saved].to(own.device)
    weight.copy_(state.pop("weight"))
    optimizer.state[weight].update(state)
