"""Save a training and go on with it, on any number of workers or none."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdopt_tutorial.parameter_server.model import Hidden, RNNConfig

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
            asked = getattr(config, name)
            # A checkpoint from before there were constraints does not name them.
            saved = self.config.get(name, getattr(RNNConfig, name))
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
    """Write a checkpoint in one step: whoever reads finds the last one or this one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            torch.save({"format": FORMAT, **vars(checkpoint)}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; a ValueError of one line if there is none to be read."""
    try:
        with warnings.catch_warnings():  # of how a foreign pickle was written
            warnings.simplefilter("ignore", UserWarning)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"checkpoint {str(path)!r}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"checkpoint {str(path)!r}: {error.strerror}") from error
    except Exception as error:  # torch has no error of its own for a bad file
        raise ValueError(
            f"checkpoint {str(path)!r}: it is truncated, or no checkpoint at all"
        ) from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"checkpoint {str(path)!r}: another program made it")
    return Checkpoint(**content)
