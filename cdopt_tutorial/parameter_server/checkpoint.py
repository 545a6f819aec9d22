"""Save a training and go on with it, on any number of workers or none."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

import torch
from torch import Tensor

from cdopt_tutorial import whole_file
from cdopt_tutorial.parameter_server.model import (
    Hidden,
    RNNConfig,
    build_all,
    check_memory,
)

FORMAT = "cdopt_tutorial.parameter_server checkpoint 1"
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

    @property
    def settings(self) -> RNNConfig:
        """Of the run that saved it; on the CPU, since its device may not be here."""
        return RNNConfig(**self.config | {"device": "cpu"})

    def fits(self, config: RNNConfig, words: Sequence[str], windows: int) -> None:
        """Check that a run over so many windows may go on; a ValueError if not."""
        if list(words) != self.words or self.window >= windows:
            raise ValueError(
                "the checkpoint is of another text: this one has other words, or no "
                f"more than the {self.window} windows that are done"
            )
        for name in MUST_MATCH:
            saved, asked = getattr(self.settings, name), getattr(config, name)
            if saved != asked:
                raise ValueError(
                    f"the checkpoint has {name} {saved!r}, but {asked!r} was asked for"
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
    """Write a checkpoint in one step: whoever reads finds the last one or this one.

    OSError if it can't be written.
    """
    content = io.BytesIO()  # torch itself says of a full disk only that it is at fault
    torch.save({"format": FORMAT, **vars(checkpoint)}, content)
    whole_file.write(path, content.getbuffer())


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; a ValueError of one line if there is none to be read."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a directory, or a device")
        with path.open("rb") as file:
            return _checked(_read(file))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"checkpoint {str(path)!r}: {why}") from error


def _read(file: BinaryIO) -> Any:
    try:
        with ZipFile(file) as archive:  # torch does not look at the checksums in it
            damaged = archive.testzip()
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # neither has an error of its own for a bad file
        what = "it is damaged or truncated, or no checkpoint at all"
        raise ValueError(what) from error
    if damaged is not None:
        raise ValueError(f"it is damaged: {damaged} is not what was written")
    return content


def _checked(content: Any) -> Checkpoint:
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError("another program made it")
    try:
        found = Checkpoint(**content)
        check_memory(len(found.words), found.settings)
        own = build_all(len(found.words), found.settings).state_dict()
        if _kinds(found.weights) == _kinds(own):
            return found
    except Exception:  # whatever a part that is missing, or of another type, leads to
        pass
    raise ValueError("its parts can't be of one run")


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple]:
    return {name: (each.dtype, each.shape) for name, each in tensors.items()}
