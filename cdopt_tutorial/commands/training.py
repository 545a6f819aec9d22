"""What the commands that train share: their flags, how a run begins, and its end."""

import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import Tensor
from tyro.conf import DisallowNone, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from cdopt_tutorial import torchrun
from cdopt_tutorial.commands import COMMANDS, common
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.run import interface, on_ray
from cdopt_tutorial.training import Progress

LIKE_ONE_PROCESS = {"dtype": "float64", "dropout": 0.0}  # where a config has them
numbers = ConstructorRegistry()


@dataclass(frozen=True)
class Flags:
    """The flags of all systems, besides the fields of their configs."""

    smoke: bool = False  #: a run of seconds, to see that it works
    json: Path | None = None  #: write the results to this file
    #: repeat the run in one process and compare the weights; where there is a choice,
    #: in float64 and with no dropout
    against_local: Annotated[bool, arg(aliases=["--replay"])] = False
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

    ``smoke`` are settings of a smoke run. Tyro exits with 2 if it can't read a flag; a
    value that is refused is a `UsageError`.
    """

    @dataclass(frozen=True)
    class Unchecked(flags, config):
        def __post_init__(self):
            pass

    # A factor of the penalty has a short flag, too.
    long = [re.sub("^--penalty(?=$|=)", "--penalty-param", word) for word in arguments]
    given = tyro.cli(
        Unchecked, prog=f"cdopt-tutorial {name}", description=COMMANDS[name], args=long,
        registry=numbers, config=(DisallowNone,),
    )  # fmt: skip
    values = {field.name: getattr(given, field.name) for field in fields(config)}
    if given.against_local:
        values |= {n: v for n, v in LIKE_ONE_PROCESS.items() if n in values}
    with common.bad_input():
        if given.json is not None:
            common.writable(given.json)
        checked = config(**values | (smoke if given.smoke else {}))
        return checked, given, {"on": _engine(given), "deadline": math.inf}


@numbers.primitive_rule
def _number(info: Any) -> PrimitiveConstructorSpec | None:
    """How a number is read: another text is refused in one line."""
    if (kind := info.type) not in (int, float):
        return None

    def read(texts: list[str]) -> float:
        with suppress(ValueError):
            return kind(texts[0])
        raise common.UsageError(f"{texts[0]!r} is not of the type {kind.__name__}")

    return PrimitiveConstructorSpec(
        nargs=1, metavar=kind.__name__.upper(), instance_from_str=read,
        is_instance=lambda x: isinstance(x, kind), str_from_instance=lambda x: [str(x)],
    )  # fmt: skip


def _engine(flags: Flags) -> str:
    """What carries calls, as ``launch`` takes it; ValueError if it can't here."""
    if flags.interface is not None:
        if not torchrun.is_here():
            raise ValueError("only a run under torchrun can choose an interface")
        os.environ[interface.VARIABLE] = interface.device(flags.interface)
    on = flags.engine if flags.address is None else f"{flags.engine}:{flags.address}"
    if on != "rpc":
        on_ray.check(on)
    return on


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
        raise common.Failed(
            "the training diverged; lower --lr, or --penalty if it is above 1"
        )


def finish(
    flags: Flags,
    figures: dict[str, Any],
    weights: Mapping[str, Tensor],
    repeat: Callable[[], Any],
) -> int:
    """Compare with one process, write and print; 1 if a task was not solved.

    Lists and tables are in the file of --json only.
    """
    compared = flags.against_local and torchrun.is_first()
    gap = max_difference(weights, repeat().weights) if compared else None
    figures["max_parameter_difference"] = gap
    common.write_json(flags.json, figures)
    for name, value in figures.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        if isinstance(value, str | int):
            print(f"{name:26} {value}")
    return 0 if flags.smoke or figures.get("solved", True) else 1
