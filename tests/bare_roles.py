"""Roles for the tests of the bare programs; they must be importable by workers.

The programs themselves are modules that the tests write to where workers find them.
"""

import importlib
import math

import torch
import torch.distributed.rpc as rpc
from torch import nn

from cdopt_tutorial.engines.process import meeting


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
