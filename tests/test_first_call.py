"""A fault of torch: an RRef's first `rpc_async()` is in no context of gradients."""

import torch
from torch.distributed import autograd, rpc

from cdopt_tutorial.run import Role, launch, serve


def gradients(context):
    return len(autograd.get_gradients(context))


def two_steps(way):
    layer, x, found = rpc.remote("ps", torch.nn.Linear, (1, 1)), torch.ones(1), []
    for _ in range(2):
        with autograd.context() as context:
            method = getattr(layer, way)().forward
            y = method(x).wait() if way == "rpc_async" else method(x)
            autograd.backward(context, [y.sum()])
            found.append(rpc.rpc_sync("ps", gradients, (context,)))
    return found


def test_the_first_call_by_rpc_async_leaves_no_gradient():
    roles = {way: Role(two_steps, (way,)) for way in ("rpc_async", "rpc_sync")}
    found = launch(roles | {"ps": Role(serve)})
    assert found == {"rpc_async": [0, 2], "rpc_sync": [2, 2], "ps": None}
