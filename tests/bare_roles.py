"""Roles for the tests of the bare programs; they must be importable by workers.

The programs themselves are modules that the tests write where workers find them.
"""

import importlib
import math
import tempfile

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

ALL_REDUCE = torch.ops.c10d_functional.all_reduce


def values(shape):
    """Initial numbers, by the shape alone, because threads of a server race to draw."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)


@torch.no_grad()
def begin(module):
    for parameter in module.parameters():
        parameter.copy_(values(parameter.shape))


def attach():
    """Set up a worker as the program does, but in float64 and with known weights."""
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
    with tempfile.TemporaryDirectory() as folder:
        of = table, f"file://{folder}/trainers"
        calls = [rpc.rpc_async(i, bare.train, (i, *of), timeout=0) for i in (0, 1)]
        layers = [call.wait() for call in calls]
    return [named(("table", "dense"), (table.to_here(), each)) for each in layers]


def train_servers(rank):
    """A trainer's role: the rows of both servers, once both trainers are done."""
    bare = importlib.import_module("bare_servers")
    bare.train(rank)
    return [rpc.rpc_sync(server, own_rows) for server in bare.SERVERS]


def own_rows():
    return importlib.import_module("bare_servers").weight.detach()


def named(names, modules):
    return {
        f"{name}.{part}": value
        for name, module in zip(names, modules, strict=True)
        for part, value in module.state_dict().items()
    }


def in_float64():
    torch.set_default_dtype(torch.float64)


def train_shards(rank, path):
    """The role of a rank: parameters, whole, by the program and by the package."""
    module, names = importlib.import_module("bare_shards"), ("vectors", "up", "down")
    with CommDebugMode() as counted:
        bare = module.train(rank, path)
    text = module.read_text()
    start = module.starts(int(text.max()) + 1)  # and the random stream goes on from it
    found = {"bare": bare, "start": start, "package": train_parts(module, text, *start)}
    whole = {who: dict(zip(names, each, strict=True)) for who, each in found.items()}
    return whole | {"all-reduces": counted.get_comm_counts()[ALL_REDUCE]}


def train_parts(module, text, vectors, up, down):
    """The same by torch's tensor parallel and the package's `dissolve`."""
    model = nn.ModuleDict()
    for name, value in ("up", up), ("down", down):
        model[name] = nn.Linear(1, 1, device="meta")  # where nothing is drawn
        model[name].weight, model[name].bias = nn.Parameter(value.clone()), None
    cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), cuts)
    dissolve(model["up"], penalty_param=module.PENALTY_PARAM)
    parameters = [nn.Parameter(vectors.clone()), *model.parameters()]
    optimizer, constraints = torch.optim.Adam(parameters, module.LR), Constraints(model)
    for _ in range(module.STEPS):
        at = torch.randint(len(text) - module.CONTEXT, (module.BATCH, 1))
        window = text[at + torch.arange(module.CONTEXT + 1)]
        hidden = torch.tanh(model["up"](parameters[0][window[:, :-1]].flatten(1)))
        loss = nn.functional.cross_entropy(model["down"](hidden), window[:, -1])
        (loss + constraints.penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ends = parameters[0], *(each.full_tensor() for each in parameters[1:])
    return [each.detach() for each in ends]


def train_fsdp(rank, path):
    """The role of a rank of the program."""
    return importlib.import_module("bare_fsdp").train(rank, path)


def train_fsdp_alone():
    """The same in one process, on the joint batch, by the package's `dissolve`."""
    module = importlib.import_module("bare_fsdp")
    torch.manual_seed(0)
    model = module.Transformer()
    for block in model.blocks.layers:
        nn.init.orthogonal_(block.linear1.weight)
        dissolve(block.linear1, penalty_param=module.PENALTY_PARAM)
    constraints = Constraints(model)
    free = dict(model.named_parameters())
    tall = [free.pop(name) for name in [*free] if name.endswith("original")]
    groups = {"params": tall, "weight_decay": 0.0}, {"params": free.values()}
    optimizer = torch.optim.AdamW(groups, module.LR)
    text = torch.tensor(list(open(nn.functional.__file__, "rb").read()))
    draws = [torch.Generator().manual_seed(rank) for rank in range(module.RANKS)]
    most, size = len(text) - module.CONTEXT, (module.BATCH, 1)
    for _ in range(module.STEPS):
        begins = torch.cat([torch.randint(most, size, generator=g) for g in draws])
        at = begins + torch.arange(module.CONTEXT)
        loss = nn.functional.cross_entropy(model(text[at]), text[at + 1].flatten())
        (loss + constraints.penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()
    constraints.project_()
    return {name: p.detach() for name, p in model.named_parameters()}
