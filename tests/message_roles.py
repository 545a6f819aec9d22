"""What makes torch complain, in plain torch: each case fails, and works once mended."""

import io
import multiprocessing
import os
import pickle
import resource
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import TCPStore, rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
START = """from multiprocessing import get_context
process = get_context("spawn").Process(target=f)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""
x = torch.ones(1, 2)


def python(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)


# In one process, without a process group.


def spawn_at_the_top(mended):
    start = START.replace("\n", "\n    ")
    start = f"if __name__ == '__main__':\n    {start}" if mended else START
    Path("program.py").write_text(f"def f(): pass\n{start}")
    python("program.py")


def function_of_a_notebook(mended):
    function = "from gc import collect as f" if mended else "def f(): pass"
    python("-c", f"{function}\n{START}")


def port_is_taken(mended):
    with socket.create_server(("127.0.0.1", 0)) as other:
        TCPStore("127.0.0.1", 0 if mended else other.getsockname()[1], 1, True)


def nobody_at_the_port(mended):
    soon = timedelta(seconds=300 if mended else 0.5)
    first = TCPStore("127.0.0.1", 0, 1, True)
    TCPStore("127.0.0.1", first.port if mended else 1, 1, False, soon)


def a_process_is_missing(mended):
    TCPStore(
        "127.0.0.1",
        0,
        1 if mended else 2,
        True,
        timedelta(seconds=300 if mended else 1),
    )


def no_launcher(mended):
    with mock.patch.dict(
        os.environ, MASTER | {"RANK": "0", "WORLD_SIZE": "1"} if mended else {}
    ):
        dist.init_process_group("gloo")
    dist.destroy_process_group()


def few_files(mended):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft if mended else 20, hard))
    try:
        kept = [torch.ones(1).share_memory_() for _ in range(20)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(kept) == 20


def whole_modules(mended):
    model, file = nn.Linear(2, 2), io.BytesIO()
    torch.save(model.state_dict() if mended else model, file)
    file.seek(0)
    torch.load(file)


def save_parametrized(mended):
    model = register_parametrization(nn.Linear(2, 2), "weight", nn.Tanh())
    torch.save(model.state_dict() if mended else model, io.BytesIO())


# In both processes of a group.


def cut_parametrized(mended):
    model = nn.Linear(2, 2)
    if not mended:
        register_parametrization(model, "weight", nn.Tanh())
    parallelize_module(model, init_device_mesh("cpu", (2,)), ColwiseParallel())
    if mended:
        register_parametrization(model, "weight", nn.Tanh())
    model(x).sum().backward()


def mix_tensors(mended):
    weight = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,))).weight
    identity = torch.eye(2)
    if mended:
        identity = distribute_tensor(identity, weight.device_mesh, [Replicate()])
    (weight.T @ weight - identity).square().sum().backward()


def train_on_meta(mended):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if mended:
        model.to_empty(device="cpu")
        model.reset_parameters()
    model(x)


def unused_parameters(mended):
    model = nn.Linear(2, 2)
    model.unused = nn.Linear(2, 2)
    model = DistributedDataParallel(model, find_unused_parameters=mended)
    for _ in range(2):
        model(x).sum().backward()


def checkpoint_twice(mended):
    class Twice(nn.Linear):
        def forward(self, values):
            again = partial(checkpoint, super().forward, use_reentrant=not mended)
            return again(again(values))

    model = DistributedDataParallel(Twice(2, 2), find_unused_parameters=True)
    model(x.clone().requires_grad_()).sum().backward()


def call_alone(mended):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)  # which connects them
    group.set_timeout(timedelta(seconds=300 if mended else 0.5))
    if mended or dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)


def peer_dies(mended):
    if dist.get_rank() == 1 and not mended:
        os._exit(1)
    dist.all_reduce(torch.ones(1))


# In the first of two workers of RPC.


class Server:
    def __init__(self):
        self.weight, self.layer = torch.ones(2, 2, requires_grad=True), nn.Linear(2, 2)

    def forward(self, values, copied=True):
        weight = self.weight.clone() if copied else self.weight
        return values @ weight @ weight

    def step(self):
        with torch.no_grad():
            self.weight.add_(1)

    def parameters(self):
        return [rpc.RRef(each) for each in self.layer.parameters()]


def step_between(mended, server):
    with dist_autograd.context() as context:
        loss = server.rpc_sync().forward(x, mended).sum()
        server.rpc_sync().step()
        dist_autograd.backward(context, [loss])


def plain_backward(mended, server):
    with dist_autograd.context() as context:
        loss = server.rpc_sync().forward(x).sum()
        dist_autograd.backward(context, [loss]) if mended else loss.backward()


def no_grad_in_place(mended, server):
    mine = x.clone().requires_grad_()
    with dist_autograd.context() as context:
        loss = server.rpc_sync().forward(mine).sum()
        dist_autograd.backward(context, [loss])
        grad = dist_autograd.get_gradients(context)[mine] if mended else mine.grad
        assert grad.norm() > 0


def step_too_late(mended, server):
    parameters = server.rpc_sync().parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [server.rpc_sync().forward(x).sum()])
        if mended:
            optimizer.step(context)
    if not mended:
        optimizer.step(context)


def owns(reference):
    return reference.is_owner()


def pickle_reference(mended, server):
    rpc.rpc_sync("worker1", owns, (server,)) if mended else pickle.dumps(server)


def long_call(mended, server):
    rpc.rpc_sync("worker1", time.sleep, (0.3,), timeout=0 if mended else 0.1)


def send_from_a_gpu(mended, server):
    there = torch.ones(2, device="meta")  # in place of the GPU
    rpc.rpc_sync("worker1", torch.numel, (torch.ones(2) if mended else there,))


def init_rpc_twice(mended, server):
    again = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{Path.cwd()}/again")
    if not mended:
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=again)


def callee_dies(mended, server):
    rpc.rpc_sync("worker1", os.getpid if mended else os._exit, () if mended else (1,))


ALONE = spawn_at_the_top, function_of_a_notebook, port_is_taken, nobody_at_the_port
ALONE += a_process_is_missing, no_launcher, few_files, whole_modules, save_parametrized
GROUP = cut_parametrized, mix_tensors, train_on_meta, unused_parameters
GROUP += checkpoint_twice, call_alone, peer_dies
CALLER = step_between, plain_backward, no_grad_in_place, step_too_late
CALLER += pickle_reference, long_call, send_from_a_gpu, init_rpc_twice, callee_dies


def look(cases, folder, *arguments):
    """Run each twice, first mended, because a failure may leave things broken."""
    for case in cases:
        for mended in True, False:
            text = ""
            try:
                case(mended, *arguments)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            (folder / f"{case.__name__}-{mended}").write_text(text)


def alone(folder, rank):
    if rank == 0:
        look(ALONE, folder)


def group(folder, rank):
    file = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
    look(GROUP, folder / str(rank))


def caller(folder, rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"worker{rank}", None, rank, 2, options)
    if rank == 0:
        look(CALLER, folder, rpc.remote("worker1", Server))
        os._exit(0)
    rpc.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(LOOPBACK)
    fork = multiprocessing.get_context("fork")
    each = [(program, rank) for program in (alone, group, caller) for rank in (0, 1)]
    processes = [fork.Process(target=f, args=(Path.cwd(), rank)) for f, rank in each]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
