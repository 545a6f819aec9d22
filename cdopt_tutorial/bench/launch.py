"""How long it takes to start four workers, join them by RPC, and end them again."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch.distributed.rpc as rpc
import torch.multiprocessing

from cdopt_tutorial.bench.rows import Row, interleave, rows
from cdopt_tutorial.engines import Role, launch, process, serve

NUM_WORKERS = 4
BASELINE = "torch.multiprocessing.spawn"
UNITS = {"start to end": "s"}


def measure(
    progress: Callable[[str], None], smoke: bool = False
) -> tuple[list[Row], dict]:
    """Measure all ways of starting, each turn in a fresh parent.

    Args:
        progress: called with a line before each measurement.
        smoke: one turn of two workers instead of five of four.

    Returns:
        The rows, and every single value.
    """
    functions = {
        BASELINE: "time_spawn",
        "launch, first in a parent": "time_first_launch",
        "launch, later": "time_later_launch",
    }
    num_workers = 2 if smoke else NUM_WORKERS
    variants = {
        name: lambda _, function=function: _in_fresh_parent(function, num_workers)
        for name, function in functions.items()
    }
    values = interleave(variants, range(1, 2 if smoke else 6), progress)
    return rows(values, UNITS, BASELINE), {"values": values}


def _in_fresh_parent(function: str, num_workers: int) -> dict[str, float]:
    """Call a function of this module in a new interpreter; its stdout is the value."""
    code = (
        f"from {__name__} import {function} as f; import json; "
        f"print(json.dumps(f({num_workers})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    return {"start to end": json.loads(done.stdout.splitlines()[-1])}


def time_spawn(num_workers: int) -> float:
    """Seconds with torch's own ``spawn``, each worker joining as ours do."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        torch.multiprocessing.spawn(
            _join, args=(f"file://{folder}/meet", num_workers), nprocs=num_workers
        )
        return time.perf_counter() - begin


def time_first_launch(num_workers: int) -> float:
    """Seconds of a parent's first launch, which starts the fork server too."""
    return _time_launch(num_workers)


def time_later_launch(num_workers: int) -> float:
    """Seconds of a later launch, when the fork server has imported torch."""
    _time_launch(num_workers)
    return _time_launch(num_workers)


def _time_launch(num_workers: int) -> float:
    begin = time.perf_counter()
    launch({f"worker{rank}": Role(serve) for rank in range(num_workers)})
    return time.perf_counter() - begin


def _join(rank: int, init_method: str, num_workers: int) -> None:
    os.environ["TP_SOCKET_IFNAME"] = process.LOOPBACK
    process.ignore_own_warning()
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=num_workers, rpc_backend_options=options
    )
    rpc.shutdown()
