"""What the commands that train share: their flags, a run, and its results.

A system's command is a module with the system's ``Config``, the other ``Flags``, what a
``SMOKE`` run sets, and two functions: ``prepare(config, flags)`` makes and checks the
job, and ``train(job, flags, **options)`` returns the figures of a run, by name.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from cdopt_tutorial import torchrun
from cdopt_tutorial.checks import choices
from cdopt_tutorial.commands import common
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.run import interface, on_ray
from cdopt_tutorial.training import Progress

LIKE_ONE_PROCESS = {"dtype": "float64", "dropout": 0.0}  # of --against-local
Switch = FlagCreatePairsOff[bool]
numbers = ConstructorRegistry()


@dataclass(frozen=True)
class Flags:
    """The flags of all systems, besides the fields of their configs."""

    smoke: Switch = False  #: a run of seconds, to see that it works
    json: Path | None = None  #: write the results to this file
    engine: str = "rpc"  #: what starts the workers, and carries calls: rpc or ray
    #: of a cluster of Ray, host:port or auto; by default one is started
    address: str | None = None
    #: that workers listen on under torchrun, such as eth0; by default the one that
    #: leads to the first host
    interface: str | None = None


@dataclass(frozen=True)
class ComparedFlags(Flags):
    """The same, for systems that are compared with one process."""

    #: run the same in one process, too; in float64, and with no dropout
    against_local: Switch = False


def run(system: ModuleType, arguments: list[str]) -> int:
    """Train as the flags say: 0, or 1 if a task was to be solved and was not."""
    flags = read_flags(system, arguments)
    with common.bad_input():
        if flags.json is not None:
            common.writable(flags.json)
        job = system.prepare(read_config(system, flags), flags)
        engine = read_engine(flags)
    figures = system.train(job, flags, on=engine, deadline=math.inf)
    common.write_json(flags.json, figures)
    show(figures)
    return 0 if flags.smoke or figures.get("solved", True) else 1


def read_flags(system: ModuleType, arguments: list[str]) -> Any:
    """The system's flags and its config's, not checked yet; a bad one exits with 2."""

    @dataclass(frozen=True)  # of bases that mypy can't know
    class Unchecked(system.Flags, system.Config):  # type: ignore[name-defined]
        def __post_init__(self):
            pass

    # A factor of the penalty has a short flag, too.
    long = [re.sub("^--penalty(?=$|=)", "--penalty-param", word) for word in arguments]
    command, what = str(system.__doc__).replace("`", "").split(": ")
    return tyro.cli(
        Unchecked, prog=command, description=what, args=long, registry=numbers,
        config=(DisallowNone,),
    )  # fmt: skip


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


def read_config(system: ModuleType, flags: Any) -> Any:
    """The config that the flags describe; in a smoke run, with its smaller values."""
    values = {field.name: getattr(flags, field.name) for field in fields(system.Config)}
    if getattr(flags, "against_local", False):
        values |= {n: v for n, v in LIKE_ONE_PROCESS.items() if n in values}
    return system.Config(**values | (system.SMOKE if flags.smoke else {}))


def read_engine(flags: Flags) -> str:
    """What the flags have carry calls; ValueError if it is not available."""
    choices(flags, engine=("rpc", "ray"))
    if flags.interface is not None:
        if not torchrun.is_here():
            raise ValueError(
                f"interface is {flags.interface!r}, but only a run under torchrun can "
                "choose one"
            )
        os.environ[interface.VARIABLE] = interface.device(flags.interface)
    if flags.address is not None and flags.engine != "ray":
        raise ValueError("address is of a cluster of Ray, so it needs engine ray")
    on = flags.engine if flags.address is None else f"ray:{flags.address}"
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


def difference(compare: bool, weights: Mapping, repeat: Callable) -> dict[str, Any]:
    """Run the same in one process, and print how far its weights are from these."""
    gap = None
    if compare and torchrun.is_first():
        gap = max_difference(weights, repeat().weights)
        print(f"largest difference from one process: {gap:.1e}")
    return {"max_parameter_difference": gap}


def show(figures: Mapping[str, Any]) -> None:
    """Print the single figures; lists and tables are in the file of --json only."""
    for name, value in figures.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        if isinstance(value, str | int):
            print(f"{name:26} {value}")
