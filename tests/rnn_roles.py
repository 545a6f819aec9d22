"""Roles for the tests of the parameter server; they must be importable by workers."""

import torch
from torch import nn

from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.seam import gradients
from cdopt_tutorial.engines.seam.reference import apply
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.parameter_server import RNNConfig
from cdopt_tutorial.parameter_server.model import RNNModel, build
from cdopt_tutorial.parameter_server.system import Owner


def play(functions):
    """What a trainer gets from each of these, which come with their arguments."""
    roles = {"ps": Role(serve), "trainer0": Role(play_each, (functions,))}
    return launch(roles)["trainer0"]


def play_each(functions):
    return [function(*args) for function, *args in functions]


class Two(nn.Module):
    """Two numbers, one of which the second context does not touch."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))
        self.b = nn.Parameter(torch.ones(()))

    def total(self, with_b):
        return self.a + self.b if with_b else self.a * 1.0

    def values(self):
        return self.a.item(), self.b.item()


HALF = RNNConfig(optimizer="sgd", lr=0.5, momentum=0.0, clip=None)


def step_owner_twice(engine):
    """Both numbers after a step that touches both, and one of one; by an owner.

    And ‖g‖² of each context, and how many gradients the owner has kept.
    """
    two = engine.remote("ps", Two)
    owner = engine.remote("ps", Owner, {"two": two}, HALF)
    seen, norms = [], []
    for with_b in (True, False):
        with engine.context() as context:
            gradients.backward(context, gradients.call(two, Two.total, with_b))
            norms.append(owner.rpc_sync().squared_norm(context))
            owner.rpc_sync().step(context, 1.0)
        seen.append(apply(two, Two.values))
    kept = apply(owner, number_kept)
    return [list(values) for values in zip(*seen, strict=True)], norms, kept


def number_kept(_):
    return len(gradients._kept_gradients)


def switch_modes(config):
    """Whether the parts on the server are in training mode, after each switch."""
    engine, names = TorchRPC(), ("embedding", "decoder")
    parts = {name: engine.remote("ps", build, name, 9, config) for name in names}
    own = {"rnn": engine.reference(build("rnn", 9, config))}
    model, modes = RNNModel(parts | own, config), []
    for switch in (model.eval, model.train, model.eval):
        switch()
        modes.append(tuple(apply(part, is_training) for part in parts.values()))
    return modes


def is_training(module):
    return module.drop.training
