"""Save a training and go on with it, on any number of workers or none."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
        if list(words) != self.words:
            raise ValueError(
                f"the checkpoint is of another text: it has {len(self.words)} words, "
                f"this one has {len(words)}, and not all are the same"
            )
        if self.window >= windows:
            raise ValueError(
                f"the checkpoint is of another text: {self.window} windows of a pass "
                f"are done, but this one has {windows}"
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
        if not path.exists():
            raise ValueError("there is no such file")
        if not path.is_file():
            raise ValueError("it is a directory, or a device")
        with path.open("rb") as file:
            return _checked(_read(file))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"checkpoint {str(path)!r}: {why}") from error


def _read(file: BinaryIO) -> Any:
    """What is in a file, if it is what was written."""
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
    """The checkpoint of what a file has, if all of it belongs together."""
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError("another program made it")
    if odd := {each.name for each in fields(Checkpoint)} ^ content.keys():
        raise ValueError(f"{', '.join(sorted(map(str, odd)))}: missing, or not known")
    found, part = Checkpoint(**content), "config"
    try:
        config, part = found.settings, "weights"
        check_memory(len(found.words), config)
        own = build_all(len(found.words), config).state_dict()
        whole = _kinds(found.weights) == _kinds(own)
    except Exception:  # whatever a part of another type leads to
        whole = False
    if not whole:
        raise ValueError(f"its {part} can't be of such a run")
    return found


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple]:
    return {name: (each.dtype, each.shape) for name, each in tensors.items()}
