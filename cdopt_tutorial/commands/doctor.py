"""`cdopt-tutorial doctor`: say whether runs will work, here and with a second host."""

import argparse
import os
import platform
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist
from joblib import cpu_count

from cdopt_tutorial import checks, own_network
from cdopt_tutorial.checks import MB
from cdopt_tutorial.commands import common, peer
from cdopt_tutorial.engines.launcher.launch import check_open_files
from cdopt_tutorial.engines.seam.device import gpus_of
from cdopt_tutorial.engines.torchrun import store

WORKERS, MEMORY, DISK = 4, 600 * MB, 100 * MB  # memory as chapter 1 used it
QUOTAS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
ELSEWHERE = "192.0.2.1"  # an address that no host has (RFC 5737); nothing is sent
HOSTS, NETWORK = "book/hosts.md#ask-the-doctor", "book/network.md#own-network"
MACHINE, SETUP = "book/errors.md#the-doctor", "book/setup.md#own-environment"
GPU = "book/gpu.md"

Found = tuple[str, str]  # "ok", "remark" or "fails", and the text


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    flag = parser.add_argument
    who = "a second host, on which doctor runs as well, with this one as its peer"
    flag("--peer", metavar="HOST", help=who)
    port = "at which the two find each other (default: %(default)s)"
    flag("--port", metavar="N", type=int, default=29500, help=port)
    wait = "seconds to wait for the peer (default: %(default)s)"
    flag("--wait", metavar="N", type=float, default=2, help=wait)
    common.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print a line for each finding, and the verdict."""
    with common.bad_input():
        checks.check(args, "port", 0 < args.port < 2**16, "1 to 65535")
        checks.check(args, "wait", 0 <= args.wait <= 3600, "0 to 3600")
    findings = []
    for finding in _examine(args):
        findings.append(finding)
        print("{level:<7} {about:<10}{text}".format(**finding))
    failing = [each["page"] for each in findings if each["level"] == "fails"]
    remarks = [each["page"] for each in findings if each["level"] == "remark"]
    where = f"with {args.peer}" if args.peer else "on this host"
    how = "fail" if failing else "work, with remarks" if remarks else "work"
    verdict = f"runs {where} will {how}"
    if pages := ", ".join(dict.fromkeys(failing or remarks)):
        verdict += f" (see {pages})"
    found = {"works": not failing, "verdict": verdict, "findings": findings}
    common.write_json(args.json, found)
    if failing:
        raise common.Failed(verdict)
    print(verdict)


def _examine(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    limit = time.monotonic() + args.wait
    yield _find("name", HOSTS, _name)
    yield (interface := _find("interface", HOSTS, _interface, args.peer))
    yield _find("network", NETWORK, _network)
    yield _find("machine", MACHINE, _machine)
    yield _find("versions", SETUP, _packages)
    if args.peer and interface["level"] == "ok":
        yield _find("peer", HOSTS, _peer, args.peer, args.port, limit)
    # Last, since a process forked after this could not use a GPU.
    yield _find("GPUs", GPU, _gpus)


def _find(about: str, page: str, check: Callable[..., Found], *args) -> dict[str, str]:
    try:
        level, text = check(*args)
    except (ValueError, OSError) as why:
        level, text = "fails", str(why)
    return {"level": level, "about": about, "text": text, "page": page}


def _name() -> Found:
    name, address = socket.gethostname(), "unknown"
    with suppress(ValueError):
        address = peer.resolve(name)
    if address.startswith(("127.", "::1", "unknown")):  # as Debian has it: 127.0.1.1
        return "remark", f"{name} is {address} here: give --master-addr an address"
    return "ok", f"{name} is {address}"


def _interface(name: str | None) -> Found:
    to = peer.resolve(name) if name else ELSEWHERE
    try:
        device = store.interface(to)
    except OSError:
        if name:
            return "fails", f"none leads to {name}: check the link and the routes"
        return "remark", "none leads out of this host, so runs stay on it"
    if os.environ.get(store.INTERFACE):
        return "ok", f"{device}, by {store.INTERFACE}"
    return "ok", f"{device}, which leads {f'to {name}' if name else 'out of this host'}"


def _network() -> Found:
    if os.environ.get(own_network.VARIABLE) == "host":
        return "ok", f"workers stay in this host's, by {own_network.VARIABLE}"
    if own_network.is_allowed():
        return "ok", "workers on one host get a network of their own"
    return "remark", "workers share this host's: the kernel refuses them their own"


def _machine() -> Found:
    check_open_files(WORKERS, polling=True)
    memory, folder = checks.free_memory(), tempfile.gettempdir()
    for quota in QUOTAS:
        with suppress(OSError, ValueError):  # no such file, or "max" in it
            memory = min(memory, int(Path(quota).read_text()))
    disk = shutil.disk_usage(folder).free
    free = f"{memory // MB:,} MB of memory, {disk // MB:,} MB in {folder}"
    if memory < MEMORY or disk < DISK:
        need = f"{WORKERS} workers need {MEMORY // MB} and {DISK // MB} MB"
        return "fails", f"{free} are free, but {need}"
    return "ok", f"{cpu_count()} cores, {free}"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "cdopt", "ray"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _packages() -> Found:
    if find_spec("ray") is None:
        ray = "--engine ray needs pip install 'cdopt-tutorial[ray]'"
        return "remark", f"{_versions()}; {ray}"
    return "ok", _versions()


def _peer(name: str, port: int, limit: float) -> Found:
    other, call, reduce = peer.examine(name, port, limit, _versions())
    text = f"a call takes {call:.1f} ms, an all-reduce of 16 kB {reduce:.1f} ms"
    if other["versions"] != _versions():
        return "remark", f"{text}; but {other['name']} has {other['versions']}"
    return "ok", text


def _gpus() -> Found:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        number = len(gpus_of("cuda"))
    if warned:
        return "remark", "torch can't use them: their driver does not fit this torch"
    if number and not dist.is_nccl_available():
        return "remark", f"{number}, but this torch has no NCCL: workers use gloo"
    return "ok", f"{number}, with NCCL" if number else "none: workers use the CPU"
