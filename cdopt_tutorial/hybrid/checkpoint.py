"""Save a training, each owner its part, and resume it on any number of workers.

A checkpoint is a folder that all hosts can reach: a file of each server's rows, and one
of the trainers, which is written last. So what has that file is complete.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from cdopt_tutorial.hybrid.model import HybridConfig
from cdopt_tutorial.training import load_whole, save_whole

FORMAT = "cdopt_tutorial.hybrid checkpoint 1"
MAY_CHANGE = (
    "num_trainers", "num_servers", "shares", "lr", "epochs", "max_steps", "device",
    "gather",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What the trainers have, and where the servers' rows are."""

    config: dict[str, Any]  #: of the run that saved it
    num_tokens: int  #: rows of the whole table
    epoch: int  #: complete passes over the data
    dense: dict[str, Any]  #: the dense layer's parameters and its optimizer's state
    folder: Path  #: of the files

    def fits(self, config: HybridConfig, num_tokens: int) -> None:
        """Raise ValueError unless a run with this config and table can resume it."""
        if num_tokens != self.num_tokens:
            raise ValueError(
                f"the checkpoint has {self.num_tokens} tokens, the data {num_tokens}"
            )
        if self.epoch >= config.epochs:
            raise ValueError(
                f"epochs is {config.epochs}, but the checkpoint has done {self.epoch}"
            )
        for name in (f.name for f in fields(config) if f.name not in MAY_CHANGE):
            saved, new = self.config[name], getattr(config, name)
            if saved != new:
                raise ValueError(
                    f"the checkpoint has {name} {saved!r}, but {new!r} was asked for"
                )


def complete(saved: Checkpoint) -> None:
    """Complete a checkpoint, and remove older ones; the first trainer does this."""
    content = {"format": FORMAT, **vars(saved)}
    del content["folder"]  # it may be moved
    save_whole(saved.folder / "trainers.pt", content)
    for other in saved.folder.parent.glob("epoch-*"):
        if other != saved.folder:
            shutil.rmtree(other)


def load(keep: Path) -> Checkpoint:
    """The latest complete checkpoint of a run; ValueError, in one line, if none."""
    files = list(keep.glob("epoch-[0-9]*/trainers.pt"))
    if not files:
        raise ValueError(f"{str(keep)!r} has no complete checkpoint")
    file = max(files, key=lambda file: int(file.parent.name.removeprefix("epoch-")))
    try:
        content = load_whole(file)
        made_by = content.pop("format")
        saved = Checkpoint(**content, folder=file.parent)
    except Exception as error:  # torch has no error of its own for a bad file
        raise ValueError(f"{str(file)!r} is damaged, or no checkpoint") from error
    if made_by != FORMAT:
        raise ValueError(f"{str(file)!r} is {made_by!r}, but must be {FORMAT!r}")
    return saved


def save_rows(owner: Any, folder: Path, server: int) -> None:
    """Runs on a server: save its rows, and its optimizer's state of them."""
    (weight,), optimizer = owner.parameters, owner.optimizer
    folder.mkdir(parents=True, exist_ok=True)
    state = {"weight": weight.detach()} | optimizer.state[weight]
    save_whole(folder / f"rows-{server}.pt", state)


@torch.no_grad()
def load_rows(
    owner: Any, folder: Path, server: int, num_servers: int, num_saved: int
) -> None:
    """Runs on a server: take its rows from the files that so many servers saved.

    They are read as they are needed, so no server has more than its own.
    """
    (weight,), optimizer = owner.parameters, owner.optimizer
    state: dict[str, Tensor] = {}
    for other in range(num_saved):
        file = folder / f"rows-{other}.pt"
        try:
            saved = load_whole(file, mmap=True)
        except ValueError as error:
            raise ValueError(f"{str(file)!r}: {error}") from error
        # Row t of the table is row t // num_saved of the file t mod num_saved.
        rows = server + num_servers * torch.arange(len(weight))
        here = rows % num_saved == other
        for name, value in saved.items():
            if value.ndim == 0:  # a count of steps
                state[name] = value.clone()
                continue
            own = state.setdefault(name, torch.empty_like(weight))
            own[here.to(own.device)] = value[rows[here] // num_saved].to(own.device)
    weight.copy_(state.pop("weight"))
    optimizer.state[weight].update(state)


def dense_state(layer: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """What a trainer has of the dense layer."""
    return {"weights": layer.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def load_dense(
    saved: Mapping[str, Any], layer: nn.Module, optimizer: optim.Optimizer
) -> None:
    """Let a trainer go on with what another one had."""
    layer.load_state_dict(saved["weights"])
    groups = optimizer.state_dict()["param_groups"]  # whose learning rate may be new
    optimizer.load_state_dict({"state": saved["optimizer"], "param_groups": groups})
