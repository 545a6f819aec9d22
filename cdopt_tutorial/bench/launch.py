"""How long it takes to start four workers, join them by RPC, and end them again."""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch.distributed.rpc as rpc
import torch.multiprocessing

from cdopt_tutorial.bench.rows import Measured, Progress, compare
from cdopt_tutorial.engines import Role, launch, process, serve

BASELINE = "torch.multiprocessing.spawn"
WAYS = {
    BASELINE: "time_spawn",
    "launch, first in a parent": "time_first_launch",
    "launch, later": "time_later_launch",
}


def measure(progress: Progress, smoke: bool = False) -> Measured:
    """Time each way of starting four workers in five turns; or two workers, once."""
    num_workers, turns = (2, [1]) if smoke else (4, range(1, 6))
    variants = {
        name: partial(_in_fresh_parent, function, num_workers)
        for name, function in WAYS.items()
    }
    return compare(variants, turns, progress, {"start to end": "s"}, BASELINE)


def _in_fresh_parent(function: str, num_workers: int, _: int) -> dict[str, float]:
    """Call a function of this module in a new interpreter, which prints the value."""
    code = f"from {__name__} import {function} as f; print(f({num_workers}))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    return {"start to end": float(done.stdout.splitlines()[-1])}


def time_spawn(num_workers: int) -> float:
    """Seconds with torch's own ``spawn``, each worker joining as ours do."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        args = f"file://{folder}/rendezvous", num_workers
        torch.multiprocessing.spawn(_join, args, nprocs=num_workers)
        return time.perf_counter() - begin


def time_first_launch(num_workers: int) -> float:
    """Seconds of a parent's first launch, which starts the fork server too."""
    begin = time.perf_counter()
    launch({f"worker{rank}": Role(serve) for rank in range(num_workers)})
    return time.perf_counter() - begin


def time_later_launch(num_workers: int) -> float:
    """Seconds of a later launch, when the fork server has imported torch."""
    time_first_launch(num_workers)
    return time_first_launch(num_workers)


def _join(rank: int, init_method: str, num_workers: int) -> None:
    os.environ["TP_SOCKET_IFNAME"] = process.LOOPBACK
    process.ignore_own_warning()
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=num_workers, rpc_backend_options=options
    )
    rpc.shutdown()
