"""How long it takes to start four workers, join them by RPC, and end them again."""

import os
import subprocess
import sys
import time
from functools import partial

import torch.distributed.rpc as rpc
import torch.multiprocessing

from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.launcher import process
from cdopt_tutorial.scratch import scratch

BASELINE = "torch.multiprocessing.spawn"
WAYS = {  # a function, and which of its calls in a fresh parent counts
    BASELINE: ("time_spawn", 1),
    "launch, first in a parent": ("time_launch", 1),  # starts the fork server, too
    "launch, later": ("time_launch", 2),  # the fork server has imported torch
}


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Time each way of starting four workers in five turns; or two workers, once.

    They compute nothing, on whatever device.
    """
    num_workers, turns = (2, 1) if smoke else (4, 5)
    variants = {}
    for name, (function, calls) in WAYS.items():
        code = f"from {__name__} import {function}"
        code += f"; print({function}({num_workers}))" * calls
        variants[name] = partial(_last_number, code)
    return sweep(variants, turns, progress, {"start to end": "s"}, BASELINE)


def _last_number(code: str, _: int) -> dict[str, float]:
    """The last of the numbers that a new interpreter prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    return {"start to end": float(done.stdout.split()[-1])}


def time_spawn(num_workers: int) -> float:
    """Seconds with torch's own ``spawn``, each worker joining as ours do."""
    with scratch() as folder:
        begin = time.perf_counter()
        args = f"file://{folder}/rendezvous", num_workers
        torch.multiprocessing.spawn(_join, args, nprocs=num_workers)
        return time.perf_counter() - begin


def time_launch(num_workers: int) -> float:
    """Seconds with the book's own ``launch``."""
    begin = time.perf_counter()
    launch({f"worker{rank}": Role(serve) for rank in range(num_workers)})
    return time.perf_counter() - begin


def _join(rank: int, init_method: str, num_workers: int) -> None:
    os.environ["TP_SOCKET_IFNAME"] = process.LOOPBACK
    process.ignore_own_warning()
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", None, rank, num_workers, options)
    rpc.shutdown()
