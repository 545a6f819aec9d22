"""Save a training and resume it, on any number of workers or in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cdopt_tutorial.parameter_server.model import Hidden, RNNConfig, build_all
from cdopt_tutorial.training import load_whole, save_whole

FORMAT = "cdopt_tutorial.parameter_server checkpoint 2"
MUST_MATCH = (
    "embedding", "hidden", "seq_len", "batch_size", "optimizer", "dtype", "manifold",
    "where", "per_gate",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """All that a training needs to go on as if it had not been interrupted."""

    config: dict[str, Any]  #: of the run that saved it
    words: list[str]  #: the vocabulary
    weights: dict[str, Tensor]  #: every parameter by name
    optimizer: dict[str, dict[str, Any]]  #: its state for each parameter
    epoch: int  #: complete passes over the text
    window: int  #: windows of the next pass that are done
    hidden: Hidden  #: of all columns
    losses: list[float]  #: of all steps so far, of the joint batch

    def fits(self, config: RNNConfig, words: Sequence[str], windows: int) -> None:
        """Raise ValueError unless a run, with so many windows a pass, can resume it."""
        if list(words) != self.words:
            raise ValueError("the checkpoint is of another text: the words differ")
        for name in MUST_MATCH:
            saved, new = self.config[name], getattr(config, name)
            if saved != new:
                raise ValueError(
                    f"the checkpoint has {name} {saved!r}, but {new!r} was asked for"
                )
        if divmod(len(self.losses), windows) != (self.epoch, self.window):
            raise ValueError("the checkpoint is of another text: the length differs")


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the file by a checkpoint in one step; OSError if that is impossible."""
    save_whole(path, {"format": FORMAT, **vars(checkpoint)})


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; ValueError, in one line, if that is impossible."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a directory, or a device")
        return _checked(load_whole(path))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"checkpoint {str(path)!r}: {why}") from error


def _checked(content: Any) -> Checkpoint:
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError("another program made it")
    try:
        saved = Checkpoint(**content)
        here = saved.config | {"device": "cpu"}  # its own device may not be here
        build_all(len(saved.words), RNNConfig(**here)).load_state_dict(saved.weights)
    except Exception as error:  # a missing part, or one of another type
        raise ValueError("its parts can't be of one run") from error
    return saved
