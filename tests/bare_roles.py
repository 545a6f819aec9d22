"""Roles for the tests of the bare programs; they must be importable by workers.

The programs themselves are modules that the tests write to where workers find them.
"""

import importlib
import math

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from cdopt_tutorial.constraints import Constraints, dissolve
from cdopt_tutorial.engines.launcher.process import meeting

ALL_REDUCE = torch.ops.c10d_functional.all_reduce


def values(shape):
    """Numbers to begin with, by the shape alone: on a server threads race to draw."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)


@torch.no_grad()
def begin(module):
    for parameter in module.parameters():
        parameter.copy_(values(parameter.shape))


def attach():
    """As the program's own workers are, but in float64 and with a known start."""
    torch.jit._state.disable()
    torch.set_default_dtype(torch.float64)
    for kind in (nn.Embedding, nn.Linear, nn.LSTM):
        kind.reset_parameters = begin


def train_rnn(tokens):
    """The trainer's role: the parameters, by the package's names."""
    names = "embedding.encoder", "rnn", "decoder.decoder"
    return named(names, importlib.import_module("bare_rnn").train(tokens))


def drive_hybrid():
    """The master's role: the parameters with each of the two layers."""
    bare = importlib.import_module("bare_hybrid")
    args = (torch.zeros(bare.TOKENS, bare.WIDTH), False), {"mode": "sum"}
    table = rpc.remote("ps", nn.EmbeddingBag.from_pretrained, *args)
    path = meeting("trainers")
    calls = [rpc.rpc_async(i, bare.train, (i, table, path), timeout=0) for i in (0, 1)]
    layers = [call.wait() for call in calls]
    return [named(("table", "dense"), (table.to_here(), each)) for each in layers]


def named(names, modules):
    return {
        f"{name}.{part}": value
        for name, module in zip(names, modules, strict=True)
        for part, value in module.state_dict().items()
    }


def attach_shards():
    """In float64, and one thread each, as the program's own workers."""
    torch.set_default_dtype(torch.float64)


def train_shards(rank):
    """The role of a rank of the program: its parameters, whole, and its all-reduces."""
    path = meeting("bare")
    names = "vectors", "up", "down"
    with CommDebugMode() as counted:
        found = importlib.import_module("bare_shards").train(rank, path)
    return dict(zip(names, found, strict=True)), counted.get_comm_counts()[ALL_REDUCE]


def start_of(module):
    """The parameters that the program begins with; its random stream goes on there."""
    values = module.starts(int(module.read_text().max()) + 1)
    return dict(zip(("vectors", "up", "down"), values, strict=True))


def train_parts(rank):
    """The same by torch's tensor parallel and the package's `dissolve`."""
    module = importlib.import_module("bare_shards")
    torch.distributed.init_process_group(
        "gloo", meeting("parts"), rank=rank, world_size=2
    )
    torch.set_default_dtype(torch.float64)
    model = nn.ModuleDict({"up": nn.Linear(1, 1), "down": nn.Linear(1, 1)})
    text, start = module.read_text(), start_of(module)  # last: what is drawn goes on
    for name, layer in model.items():
        layer.weight, layer.bias = nn.Parameter(start[name]), None
    mesh = init_device_mesh("cpu", (2,))
    cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, cuts)
    dissolve(model["up"], penalty_param=module.PENALTY_PARAM)
    vectors = nn.Parameter(start["vectors"])
    parameters = [vectors, *model.parameters()]
    optimizer, constraints = torch.optim.Adam(parameters, module.LR), Constraints(model)
    for _ in range(module.STEPS):
        at = torch.randint(len(text) - module.CONTEXT, (module.BATCH, 1))
        window = text[at + torch.arange(module.CONTEXT + 1)]
        hidden = torch.tanh(model["up"](vectors[window[:, :-1]].flatten(1)))
        loss = nn.functional.cross_entropy(model["down"](hidden), window[:, -1])
        (loss + constraints.penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ends = vectors, *(each.full_tensor() for each in parameters[1:])
    return start, {n: w.detach() for n, w in zip(start, ends, strict=True)}
