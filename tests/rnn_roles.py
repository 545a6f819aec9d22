"""Roles for the tests of the parameter server; they must be importable by workers."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from cdopt_tutorial.data import Stream
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


def split_model(config, vocab_size):
    engine = TorchRPC()
    refs = {
        name: engine.remote("ps", build, name, vocab_size, config)
        for name in ("embedding", "decoder")
    }
    rnn = build("rnn", vocab_size, config)
    refs["rnn"] = engine.reference(rnn)
    return RNNModel(refs["embedding"], refs["decoder"], rnn, config), refs


def train_plainly(config, corpus):
    """As listings do that step a plain optimizer on each worker."""
    model, refs = split_model(config, len(corpus.vocabulary))
    for ref in refs.values():
        apply(ref, make_plain_optimizer, config.lr)
    stream = Stream(corpus.train, config.seq_len, config.batch_size)
    hidden = model.start(config.batch_size)
    for tokens, targets in stream.windows():
        with dist_autograd.context() as context_id:
            loss, hidden = model.loss(tokens, targets, hidden)
            dist_autograd.backward(context_id, [loss])
            for ref in refs.values():
                apply(ref, step_plain_optimizer)
        hidden = tuple(state.detach() for state in hidden)
    return {
        f"{part}.{name}": weight
        for part, ref in refs.items()
        for name, weight in apply(ref, weights_of).items()
    }


def make_plain_optimizer(module, lr):
    module.optimizer = torch.optim.SGD(module.parameters(), lr)


def step_plain_optimizer(module):
    module.optimizer.step()


def weights_of(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


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


class ForgetfulSGD(torch.optim.SGD):
    """A class that torch does not compile, and that leaves ``.grad`` as it is."""


HALF = RNNConfig(optimizer="sgd", lr=0.5, momentum=0.0, clip=None)


def rrefs_of(module):
    return [rpc.RRef(parameter) for parameter in module.parameters()]


def step_twice():
    """Both numbers after a step of torch's that touches both, and one of one."""
    two = TorchRPC().remote("ps", Two)
    optimizer = DistributedOptimizer(ForgetfulSGD, apply(two, rrefs_of), lr=0.5)
    seen = []
    for with_b in (True, False):
        with dist_autograd.context() as context_id:
            loss = gradients.call(two, Two.total, with_b)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        seen.append(apply(two, Two.values))
    return [list(values) for values in zip(*seen, strict=True)]


def step_owner_twice(engine):
    """The same by an owner, ‖g‖² of each context, and how many the owner has kept."""
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
    model, refs = split_model(config, 9)
    modes = []
    for switch in (model.eval, model.train, model.eval):
        switch()
        modes.append(
            tuple(apply(refs[n], is_training) for n in ("embedding", "decoder"))
        )
    return modes


def is_training(module):
    return module.drop.training
