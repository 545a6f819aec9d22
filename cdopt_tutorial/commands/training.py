"""What the commands that train share: their flags, how a run begins, and its end."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from cdopt_tutorial import torchrun
from cdopt_tutorial.commands import Failed, check_writable, read_flags, write_json
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.training import Progress

LIKE_ONE_PROCESS = {"dtype": "float64", "dropout": 0.0}  # where a config has them


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


def read(
    name: str, config: type, flags: type, arguments: list[str], **smoke: int
) -> tuple[Any, Any, dict[str, Any]]:
    """The config and the flags of a command, and the options of ``launch``.

    ``smoke`` are settings of a smoke run.
    """

    @dataclass(frozen=True)
    class Unchecked(flags, config):
        def __post_init__(self):
            pass

    given = read_flags(name, Unchecked, arguments)
    check_writable(given.json)
    values = {field.name: getattr(given, field.name) for field in fields(config)}
    if given.against_local:
        values |= {n: v for n, v in LIKE_ONE_PROCESS.items() if n in values}
    if given.smoke:
        values |= smoke
    if given.interface is not None:
        os.environ[torchrun.INTERFACE] = given.interface
    on = given.engine if given.address is None else f"{given.engine}:{given.address}"
    return config(**values), given, {"on": on, "deadline": math.inf}


def log(_, note: Progress) -> None:
    """Print a line after each epoch, and end a training that diverged at once."""
    score = note.valid  # checked, too: infinite weights can't be projected
    check_finite(note.train_loss + (score.loss if score else 0))
    if score is not None:
        accuracy, perplexity = score.accuracy, f"perplexity {score.perplexity:.1f}"
        valid = perplexity if accuracy is None else f"accuracy {accuracy:.3f}"
        line = f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}"
        print(f"{line}\tvalidation {valid}", flush=True)


def check_finite(loss: float) -> None:
    """End a training that diverged."""
    if not math.isfinite(loss):
        raise Failed(
            "the training diverged; lower --lr, or --penalty-param if it is above 1"
        )


def finish(
    flags: Flags,
    figures: dict[str, Any],
    weights: Mapping[str, Tensor],
    repeat: Callable[[], Any],
) -> int:
    """Compare with one process, print and write; 1 if a task was not solved.

    Lists and tables are in the file of --json only.
    """
    compared = flags.against_local and torchrun.is_first()
    gap = max_difference(weights, repeat().weights) if compared else None
    figures["max_parameter_difference"] = gap
    for name, value in figures.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        if isinstance(value, str | int):
            print(f"{name:26} {value}")
    write_json(flags.json, figures)
    return 0 if flags.smoke or figures.get("solved", True) else 1
