"""Save a training and go on with it, on any number of workers or none."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdopt_tutorial import whole_file
from cdopt_tutorial.parameter_server.model import Hidden, RNNConfig

MUST_MATCH = (
    "embedding", "hidden", "num_layers", "seq_len", "batch_size", "optimizer", "dtype",
    "manifold", "where", "per_gate",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """All that a training needs to go on as if it had not been cut off."""

    config: dict[str, Any]  #: of the run that saved it
    words: list[str]  #: the vocabulary
    weights: dict[str, Tensor]  #: every parameter by name
    optimizer: dict[str, dict[str, Any]]  #: what it keeps for each parameter
    epoch: int  #: passes over the text that are complete
    window: int  #: windows of the next pass that are done
    hidden: Hidden  #: of all columns
    losses: list[list[float]]  #: of all steps so far, for each trainer

    def fits(self, config: RNNConfig, words: Sequence[str], windows: int) -> None:
        """Check that a run over so many windows may go on; a ValueError if not."""
        if list(words) != self.words or self.window >= windows:
            raise ValueError("the checkpoint is of another text")
        for name in MUST_MATCH:
            saved, wanted = self.config[name], getattr(config, name)
            if saved != wanted:
                raise ValueError(
                    f"the checkpoint has {name} {saved!r}, but this run {wanted!r}"
                )

    def losses_of(self, trainer: int, num_trainers: int) -> list[float]:
        """A trainer's losses; the batch's, if there were more trainers or less."""
        if len(self.losses) == num_trainers:
            return list(self.losses[trainer])
        batch_size, num_saved = self.config["batch_size"], len(self.losses)
        columns = [len(p) for p in torch.arange(batch_size).tensor_split(num_saved)]
        return [
            sum(c * loss for c, loss in zip(columns, step, strict=True)) / batch_size
            for step in zip(*self.losses, strict=True)
        ]


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint at once: whoever reads finds the last one or this one."""
    content = io.BytesIO()  # torch itself says of a full disk only that it is at fault
    torch.save(vars(checkpoint), content)
    whole_file.write(path, content.getbuffer())


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; a ValueError of one line if there is none to be read."""
    try:
        content = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise ValueError(f"checkpoint {str(path)!r}: {error.strerror}") from error
    try:
        return Checkpoint(**torch.load(content, map_location="cpu", weights_only=True))
    except Exception as error:  # torch has no error of its own for a bad file
        what = "it is damaged or truncated, or no checkpoint of rnn"
        raise ValueError(f"checkpoint {str(path)!r}: {what}") from error
