"""What the commands that train share: flags for settings and engine, log, checks."""

import argparse
import inspect
import math
import os
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cdopt_tutorial import torchrun
from cdopt_tutorial.commands import common
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.run import interface, on_ray
from cdopt_tutorial.training import Progress

LIKE_ONE_PROCESS = {"dtype": "float64", "dropout": 0.0}  # of --against-local


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add a flag for each field of a config, and the flags that all systems share."""
    names, flag = [field.name for field in fields(config)], parser.add_argument
    add_fields(parser, config, [n for n in names if n not in ("dtype", "device")])
    if "dtype" in names:
        same = "run the same in one process, too; in float64, and with no dropout"
        flag("--against-local", action="store_true", help=same)
    common.add_run_flags(parser)
    common.add_device(parser, config.device)
    engine = "what starts the workers, and carries their calls (default: rpc)"
    flag("--engine", choices=("rpc", "ray"), default="rpc", help=engine)
    address = "of a cluster of Ray, host:port or auto; by default one is started"
    flag("--address", help=address)
    interface = "that workers listen on under torchrun, such as eth0; by default the "
    interface += "one that leads to the first host"
    flag("--interface", metavar="NAME", help=interface)


def add_fields(
    parser: argparse.ArgumentParser, config: type, names: Container[str]
) -> None:
    """Add a flag for each of the named fields of a config."""
    types, helps = get_type_hints(config), _comments(config)
    for field in fields(config):
        if field.name not in names:
            continue
        text = helps[field.name].partition(". ")[0].removesuffix(".")
        if not isinstance(field.default, bool | None):
            text += f" (default: {field.default})"
        parser.add_argument(
            "--" + field.name.removesuffix("_param").replace("_", "-"),
            dest=field.name,
            default=field.default,
            help=text.replace("%", "%%").replace("``", ""),
            **_reading(types[field.name], field.default),
        )


def _comments(config: type) -> dict[str, str]:
    """The ``#:`` comments above or behind a class's fields, by name."""
    field = r"((?:^ +#: .*\n)*)^ +(\w+): .+ = .+?(#: .*)?$"
    texts = {}
    bases = config.__mro__[-2::-1]  # without `object`; a subclass overrides its bases
    source = "".join(map(inspect.getsource, bases))
    for above, name, behind in re.findall(field, source, re.M):
        texts[name] = " ".join((above + behind).replace("#:", "").split())
    return texts


def _reading(hint: Any, default: Any) -> dict[str, Any]:
    """The arguments with which argparse reads a value of this type, or None."""
    kind = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default else "store_true"}
    if get_origin(kind) is tuple:
        return _reading(get_args(kind)[0], None) | {"nargs": "+"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind)}


def read_config(args: argparse.Namespace, config: type, smoke: Mapping) -> Any:
    """The config that the flags describe; in a smoke run, with its smaller values."""
    values = {}
    for field in fields(config):
        value = getattr(args, field.name, field.default)
        if field.name in LIKE_ONE_PROCESS and args.against_local:
            value = LIKE_ONE_PROCESS[field.name]
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return config(**values | (smoke if args.smoke else {}))


def read_engine(args: argparse.Namespace) -> str:
    """What the flags have carry calls; ValueError if it is not available."""
    if args.interface is not None:
        if not torchrun.is_here():
            alone = "but only a run under torchrun can choose one"
            raise ValueError(f"interface is {args.interface!r}, {alone}")
        os.environ[interface.VARIABLE] = interface.device(args.interface)
    if args.address is not None and args.engine != "ray":
        raise ValueError("address is of a cluster of Ray, so it needs engine ray")
    on = args.engine if args.address is None else f"ray:{args.address}"
    if on != "rpc":
        on_ray.check(on)
    return on


def log(_, note: Progress) -> None:
    """Print a line after each epoch, and end a training that diverged at once."""
    score = note.valid  # checked, too: infinite weights can't be projected
    check_finite(note.train_loss + (score.loss if score else 0))
    if score is not None:
        if score.accuracy is None:  # of a text
            found = f"perplexity {score.perplexity:.1f}"
        else:
            found = f"accuracy {score.accuracy:.3f}"
        line = f"Training epoch {note.epoch}\tloss {note.train_loss:.3f}"
        print(f"{line}\tvalidation {found}", flush=True)


def check_finite(loss: float) -> None:
    """End a training that diverged."""
    if not math.isfinite(loss):
        line = "the training diverged; lower --lr, or --penalty if it is above 1"
        raise common.Failed(line)


def difference(compare: bool, weights: Mapping, repeat: Callable) -> float | None:
    """Run the same in one process, and print how far its weights are from these."""
    if not compare:
        return None
    found = max_difference(weights, repeat().weights)
    print(f"largest difference from one process: {found:.1e}")
    return found
