"""What makes torch complain, in plain torch."""

import copy
import io
import multiprocessing
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import TCPStore, rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.parametrize import (
    register_parametrization,
    remove_parametrizations,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
START = """from multiprocessing import get_context
process = get_context("spawn").Process(target=f)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""
SOON = timedelta(seconds=0.5)
x = torch.ones(1, 2)


def python(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)


# In one process, without a process group.


def spawn_at_the_top():
    Path("program.py").write_text(f"def f(): pass\n{START}")
    python("program.py")


def function_of_a_notebook():
    python("-c", f"def f(): pass\n{START}")


def port_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        TCPStore("127.0.0.1", other.getsockname()[1], 1, True)


def nobody_at_the_port():
    TCPStore("127.0.0.1", 1, 1, False, SOON)


def a_process_is_missing():
    TCPStore("127.0.0.1", 0, 2, True, SOON)


def no_launcher():
    dist.init_process_group("gloo")


def old_launcher():
    Path("fails.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_args()"
    )
    python("-m", "torch.distributed.launch", "--nproc-per-node", "1", "fails.py")


def no_group():
    dist.all_reduce(torch.ones(1))


def no_rpc():
    rpc.rpc_sync("worker1", torch.numel, (x,))


def send_a_local_function():
    pickle.dumps(lambda: x)


def send_a_lock():
    pickle.dumps(threading.Lock())


def load_in_a_daemon():
    here, there = multiprocessing.Pipe()

    def load():
        try:
            list(DataLoader(x, num_workers=1))
        except AssertionError as error:
            there.send(error)

    multiprocessing.get_context("fork").Process(target=load, daemon=True).start()
    raise here.recv()


def loader_dies():
    list(DataLoader(x, num_workers=1, worker_init_fn=os._exit))


def few_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, hard))
    try:
        _ = [torch.ones(1).share_memory_() for _ in range(20)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def whole_modules():
    torch.save(nn.Linear(2, 2), file := io.BytesIO())
    file.seek(0)
    torch.load(file)


def plain_copy():
    layer = orthogonal(nn.Linear(2, 2))
    remove_parametrizations(copy.deepcopy(layer), "weight")
    layer(torch.ones(2))


def save_parametrized():
    torch.save(parametrized(), io.BytesIO())


def parametrized():
    return register_parametrization(nn.Linear(2, 2), "weight", nn.Tanh())


# In both processes of a group.


def cut_parametrized():
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(parametrized(), mesh, ColwiseParallel())


def mix_tensors():
    weight = sharded().weight
    (weight.T @ weight - torch.eye(2)).square().sum().backward()


def train_on_meta():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    sharded(model)(x)


def unused_parameters():
    model = nn.Linear(2, 2)
    model.unused = nn.Linear(2, 2)
    model = DistributedDataParallel(model)
    for _ in range(2):
        model(x).sum().backward()


def checkpoint_twice():
    class Twice(nn.Linear):
        def forward(self, values):
            again = partial(checkpoint, super().forward, use_reentrant=True)
            return again(again(values))

    model = DistributedDataParallel(Twice(2, 2), find_unused_parameters=True)
    model(x.clone().requires_grad_()).sum().backward()


def init_twice():
    dist.init_process_group("gloo")


def nothing_to_train():
    DistributedDataParallel(nn.Tanh())


def load_what_ddp_saved():
    saved = DistributedDataParallel(nn.Linear(2, 2)).state_dict()
    nn.Linear(2, 2).load_state_dict(saved)


def large_mesh():
    init_device_mesh("cpu", (4,))


def sharded(model=None):
    return fully_shard(model or nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))


def shard_a_scalar():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    sharded(model)


def copy_shards():
    copy.deepcopy(sharded())


def ddp_around_shards():
    DistributedDataParallel(sharded())


def numpy_of_a_shard():
    sharded().weight.detach().numpy()


def load_into_shards():
    sharded().load_state_dict(nn.Linear(2, 2).state_dict())


def call_alone():
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)  # which connects them
    group.set_timeout(SOON)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)


def peer_dies():
    dist.barrier()  # not before the first one has had its last message
    if dist.get_rank() == 1:
        os._exit(1)
    dist.all_reduce(torch.ones(1))


# In the first of two workers of RPC.


class Server:
    def __init__(self):
        self.weight, self.layer = torch.ones(2, 2, requires_grad=True), nn.Linear(2, 2)

    def forward(self, values):
        return values @ self.weight @ self.weight

    def step(self):
        with torch.no_grad():
            self.weight.add_(1)

    def fail(self):
        raise KeyError("no")

    def parameters(self):
        return [rpc.RRef(each) for each in self.layer.parameters()]


def step_between(server):
    with dist_autograd.context() as context:
        loss = server.rpc_sync().forward(x).sum()
        server.rpc_sync().step()
        dist_autograd.backward(context, [loss])


def plain_backward(server):
    with dist_autograd.context():
        server.rpc_sync().forward(x).sum().backward()


def no_grad_in_place(server):
    mine = x.clone().requires_grad_()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [server.rpc_sync().forward(mine).sum()])
    mine.grad.norm()


def step_too_late(server):
    parameters = server.rpc_sync().parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [server.rpc_sync().forward(x).sum()])
    optimizer.step(context)


def loss_without_a_call(server):
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [x.sum()])


def loss_of_two(server):
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [server.rpc_sync().forward(x)])


def context_in_context(server):
    with dist_autograd.context(), dist_autograd.context():
        pass


def result_without_use(server):
    with dist_autograd.context() as context:
        server.rpc_sync().forward(x)
        rpc._set_rpc_timeout(0.3)
        try:
            dist_autograd.backward(context, [server.rpc_sync().forward(x).sum()])
        finally:
            rpc._set_rpc_timeout(60)


def unknown_worker(server):
    rpc.rpc_sync("worker2", torch.numel, (x,))


def object_of_another(server):
    server.local_value()


def callee_fails(server):
    server.rpc_sync().fail()


def pickle_reference(server):
    pickle.dumps(server)


def long_call(server):
    rpc.rpc_sync("worker1", time.sleep, (0.3,), timeout=0.1)


def send_from_a_gpu(server):
    there = torch.ones(2, device="meta")  # in place of the GPU
    rpc.rpc_sync("worker1", torch.numel, (there,))


def init_rpc_twice(server):
    again = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{Path.cwd()}/again")
    rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=again)


def callee_dies(server):
    rpc.rpc_sync("worker1", os._exit, (1,))


ALONE = spawn_at_the_top, function_of_a_notebook, port_is_taken, nobody_at_the_port
ALONE += a_process_is_missing, no_launcher, old_launcher, no_group, no_rpc
ALONE += send_a_local_function, send_a_lock, load_in_a_daemon, loader_dies
ALONE += few_files, whole_modules, save_parametrized, plain_copy
GROUP = cut_parametrized, mix_tensors, train_on_meta, unused_parameters
GROUP += checkpoint_twice, init_twice, nothing_to_train
GROUP += load_what_ddp_saved, large_mesh, shard_a_scalar, copy_shards
GROUP += ddp_around_shards, numpy_of_a_shard, load_into_shards, call_alone, peer_dies
CALLER = step_between, plain_backward, no_grad_in_place, step_too_late
CALLER += loss_without_a_call, loss_of_two, context_in_context, result_without_use
CALLER += unknown_worker, object_of_another, callee_fails
CALLER += pickle_reference, long_call, send_from_a_gpu, init_rpc_twice, callee_dies


def look(cases, folder, *arguments):
    """Run each, and keep what it says."""
    for case in cases:
        try:
            case(*arguments)
        except Exception as error:
            (folder / case.__name__).write_text(f"{type(error).__name__}: {error}")


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
