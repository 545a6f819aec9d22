"""Roles for the tests of the parameter server; they must be importable by workers."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

from cdopt_tutorial.data import Stream
from cdopt_tutorial.engines.remote import parameter_rrefs, remote_method
from cdopt_tutorial.parameter_server.config import RNNConfig
from cdopt_tutorial.parameter_server.model import RNNModel, build
from cdopt_tutorial.parameter_server.optimizer import Distributed
from cdopt_tutorial.parameter_server.steps import gather


def split_model(config, vocab_size):
    refs = {
        name: rpc.remote("ps", build, args=(name, vocab_size, config))
        for name in ("embedding", "decoder")
    }
    refs["rnn"] = rpc.RRef(build("rnn", vocab_size, config))
    rnn = refs["rnn"].local_value()
    return RNNModel(refs["embedding"], refs["decoder"], rnn, config), refs


def train_plainly(config, corpus):
    """As listings do that step a plain optimizer on each worker."""
    model, refs = split_model(config, len(corpus.vocabulary))
    for ref in refs.values():
        remote_method(make_plain_optimizer, ref, config.lr)
    stream = Stream(corpus.train, config.seq_len, config.batch_size)
    hidden = model.start(config.batch_size)
    for tokens, targets in stream.windows():
        with dist_autograd.context() as context_id:
            loss, hidden = model.loss(tokens, targets, hidden)
            dist_autograd.backward(context_id, [loss])
            for ref in refs.values():
                remote_method(step_plain_optimizer, ref)
        hidden = tuple(state.detach() for state in hidden)
    return gather(refs)


def make_plain_optimizer(module, lr):
    module.optimizer = torch.optim.SGD(module.parameters(), lr)


def step_plain_optimizer(module):
    module.optimizer.step()


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


def step_twice(server):
    """Both numbers after a step that touches both, and one that touches one."""
    config = RNNConfig(optimizer="sgd", lr=0.5, momentum=0.0, clip=None)
    rref = rpc.remote(server, Two)
    optimizer = Distributed(remote_method(parameter_rrefs, rref), config)
    seen = []
    for with_b in (True, False):
        with dist_autograd.context() as context_id:
            loss = remote_method(Two.total, rref, with_b)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        seen.append(remote_method(Two.values, rref))
    return [list(values) for values in zip(*seen, strict=True)]


def optimizer_kinds(server):
    config = RNNConfig(optimizer="adam")
    rrefs = remote_method(parameter_rrefs, rpc.remote(server, Two))
    rrefs["here"] = rpc.RRef(nn.Parameter(torch.ones(1)))
    optimizer = Distributed(rrefs, config)
    return [
        rpc.rpc_sync(rref.owner(), kind_of, args=(rref,))
        for rref in optimizer._optimizer.remote_optimizers
    ]


def kind_of(rref):
    return type(rref.local_value()).__name__


def switch_modes(config):
    model, refs = split_model(config, 9)
    modes = []
    for switch in (model.eval, model.train, model.eval):
        switch()
        modes.append(
            tuple(remote_method(is_training, refs[n]) for n in ("embedding", "decoder"))
        )
    return modes


def is_training(module):
    return module.drop.training
