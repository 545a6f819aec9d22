"""The flags that choose an engine, of every command that trains on workers."""

import argparse
import os

from cdopt_tutorial import torchrun
from cdopt_tutorial.engines.on_monarch import OnMonarch
from cdopt_tutorial.engines.on_ray import OnRay
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.torchrun import store
from cdopt_tutorial.engines.workers import Workers


def add(parser: argparse.ArgumentParser) -> None:
    """Add `--engine`, `--address` and `--interface`."""
    engine = "what starts the workers, and carries their calls (default: rpc)"
    names = ("rpc", "ray", "monarch")
    parser.add_argument("--engine", choices=names, default="rpc", help=engine)
    address = "of a cluster of Ray, host:port or auto; by default one is started"
    parser.add_argument("--address", help=address)
    interface = "that workers listen on under torchrun, such as eth0; by default the "
    interface += "one that leads to the first host"
    parser.add_argument("--interface", metavar="NAME", help=interface)


def chosen(args: argparse.Namespace) -> Workers:
    """The engine that the flags name; ValueError if it is not to be had."""
    if args.interface is not None:
        if not torchrun.is_here():
            alone = "but only a run under torchrun can choose one"
            raise ValueError(f"interface is {args.interface!r}, {alone}")
        os.environ[store.INTERFACE] = store.device(args.interface)
    if args.engine == "ray":
        return OnRay(address=args.address)
    if args.address is not None:
        raise ValueError("address is of a cluster of Ray, so it needs engine ray")
    return OnMonarch() if args.engine == "monarch" else TorchRPC()
