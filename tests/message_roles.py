"""What makes torch complain, in plain torch."""

import copy
import io
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
START = """def f(): pass
from multiprocessing import get_context
process = get_context("spawn").Process(target=f)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""
FAILS = "import argparse\nargparse.ArgumentParser().parse_args()"
LAUNCH = "-m", "torch.distributed.launch", "--nproc-per-node", "1"
SOON = timedelta(seconds=0.5)
fork = get_context("fork")
linear = partial(nn.Linear, 2, 2)
x = torch.ones(1, 2)


def python(*arguments):
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)


def program(code, *options):
    Path("program.py").write_text(code)
    python(*options, "program.py")


def parametrized():
    return parametrize.register_parametrization(linear(), "weight", nn.Tanh())


def load_module():
    torch.save(linear(), "module.pt")
    torch.load("module.pt")


def use_plain_copy():
    layer = parametrizations.orthogonal(linear())
    parametrize.remove_parametrizations(copy.deepcopy(layer), "weight")
    layer(x)


def open_many_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    _ = [torch.ones(1).share_memory_() for _ in range(20)]


# In one process, without a process group.
ALONE = [
    lambda: program(START),
    lambda: python("-c", START),  # as in a notebook, there is no file
    lambda: program(FAILS, *LAUNCH),
    lambda: [dist.TCPStore("127.0.0.1", 29_571, 1, True) for _ in range(2)],
    lambda: dist.TCPStore("127.0.0.1", 1, 1, False, SOON),  # nobody is there
    lambda: dist.TCPStore("127.0.0.1", 0, 2, True, SOON),  # one process is missing
    lambda: dist.init_process_group("gloo"),
    lambda: dist.all_reduce(x),
    lambda: rpc.rpc_sync("worker1", torch.numel, (x,)),
    lambda: pickle.dumps(lambda: x),
    lambda: pickle.dumps(threading.Lock()),
    lambda: fork.Pool(1).apply(Pool),  # the processes of a pool are daemons
    lambda: list(DataLoader(x, num_workers=1, worker_init_fn=os._exit)),
    lambda: torch.save(parametrized(), io.BytesIO()),
    load_module,
    use_plain_copy,
    open_many_files,  # the last, as this process can open none afterwards
]


def mesh(ranks=2):
    return dist.init_device_mesh("cpu", (ranks,))


def sharded(model=None):
    return fully_shard(model or linear(), mesh=mesh())


def leave_parameters_unused():
    model = linear()
    model.unused = linear()
    model = DistributedDataParallel(model)
    for _ in range(2):
        model(x).sum().backward()


class Twice(nn.Linear):
    def forward(self, values):
        again = partial(checkpoint, super().forward, use_reentrant=True)
        return again(again(values))


def checkpoint_twice():
    model = DistributedDataParallel(Twice(2, 2), find_unused_parameters=True)
    model(x.clone().requires_grad_()).sum().backward()


def call_alone():
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)  # which connects them
    group.set_timeout(SOON)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)


def lose_a_peer():
    dist.barrier()  # not before the first one has had its last message
    if dist.get_rank() == 1:
        os._exit(1)
    dist.all_reduce(torch.ones(1))


# In both processes of a group.
GROUP = [
    lambda: dist.init_process_group("gloo"),
    lambda: DistributedDataParallel(nn.Tanh()),
    lambda: linear().load_state_dict(DistributedDataParallel(linear()).state_dict()),
    leave_parameters_unused,
    checkpoint_twice,
    lambda: mesh(4),
    lambda: parallelize_module(parametrized(), mesh(), ColwiseParallel()),
    lambda: sharded().weight - torch.eye(2),
    lambda: sharded(linear(device="meta"))(x),
    lambda: sharded(nn.ParameterList([torch.tensor(1.0)])),
    lambda: copy.deepcopy(sharded()),
    lambda: DistributedDataParallel(sharded()),
    lambda: sharded().weight.detach().numpy(),
    lambda: sharded().load_state_dict(linear().state_dict()),
    call_alone,
    lose_a_peer,
]


class Server:
    def __init__(self):
        self.weight = torch.ones(2, 2, requires_grad=True)

    def forward(self, values):
        return values @ self.weight @ self.weight

    @torch.no_grad()
    def step(self):
        return self.weight.add_(1).sum()


def backward(loss):
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss()])


def find_no_gradient(server):
    mine = x.clone().requires_grad_()
    backward(lambda: server.forward(mine).sum())
    mine.grad.norm()


def step_too_late(server):
    with dist_autograd.context() as context:
        loss = server.forward(x).sum()
    dist_autograd.backward(context, [loss])


def leave_a_result_unused(server):
    rpc._set_rpc_timeout(0.3)
    backward(lambda: [server.forward(x).sum() for _ in range(2)][0])


# In the first of two workers of RPC, with what calls the second one's server.
CALLER = [
    lambda server: backward(lambda: server.forward(x).sum() + server.step()),
    find_no_gradient,
    step_too_late,
    lambda server: backward(lambda: server.forward(x).sum().backward()),
    lambda server: backward(lambda: server.forward(x)),  # two numbers
    lambda server: backward(x.sum),
    lambda server: backward(lambda: backward(x.sum)),
    lambda server: rpc.remote("worker1", Server).local_value(),
    lambda server: pickle.dumps(rpc.remote("worker1", Server)),
    lambda server: rpc.rpc_sync("worker2", torch.numel, (x,)),
    lambda server: server.forward("no tensor"),
    lambda server: rpc.rpc_sync("worker1", time.sleep, (0.3,), timeout=0.1),
    # In place of a GPU.
    lambda server: rpc.rpc_sync("worker1", torch.numel, (x.to("meta"),)),
    lambda server: init_rpc(0, "again"),
    leave_a_result_unused,
    lambda server: rpc.rpc_sync("worker1", os._exit, (1,), timeout=60),
]


def init_rpc(rank, file):
    file = f"file://{Path.cwd()}/{file}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=file)
    rpc.init_rpc(f"worker{rank}", None, rank, 2, options)


def look(cases, name, *arguments):
    """Run each, and keep what it says."""
    with open(f"{name}.said", "w") as said:
        for case in cases:
            try:
                case(*arguments)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                print(text, end="\0", file=said, flush=True)


def group(rank):
    file = f"file://{Path.cwd()}/group"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
    look(GROUP, f"rank{rank}")


def worker(rank):
    init_rpc(rank, "rpc")
    if rank == 0:
        look(CALLER, "caller", rpc.remote("worker1", Server).rpc_sync())
        os._exit(0)
    rpc.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(LOOPBACK)
    processes = [fork.Process(target=look, args=(ALONE, "alone"))]
    for role in group, worker:
        processes += [fork.Process(target=role, args=(rank,)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
