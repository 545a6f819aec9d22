"""Constrained modules on other workers."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed.rpc as rpc
from constrained import F64, move_
from torch import nn
from torch.distributed.nn.api.remote_module import RemoteModule

from cdopt_tutorial import constraints
from cdopt_tutorial.calls import apply, gradients, remote
from cdopt_tutorial.calls.references import Ref
from cdopt_tutorial.constraints import dissolved
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.run import Role, launch, serve


class Tail(nn.Sequential):
    """What a server owns: two dissolved layers, off their manifolds."""

    def __init__(self, seed=0, factor=1.1):
        # Its own generator, since other threads use the global one, too.
        generator = torch.Generator().manual_seed(seed)
        wide, square = nn.Linear(6, 4, **F64), nn.Linear(4, 3, **F64)
        for parameter in *wide.parameters(), *square.parameters():
            nn.init.normal_(parameter, generator=generator)
        constraints.dissolve(wide)
        constraints.dissolve(square, manifold="oblique")
        super().__init__(wide, nn.Tanh(), square)
        move_(self, factor)


def loss_of(model, x):
    return model(x).square().sum()


def kept(module, context):
    """On the owner: a context's gradient of each parameter."""
    found = gradients.gradients(context, module.parameters())
    return {name: found[p] for name, p in module.named_parameters()}


def with_penalty(ref, x, between=lambda: None):
    """Gradients, on the owner, of a loss and two penalties."""
    with gradients.context() as context:
        terms = [gradients.call(ref, loss_of, x), *map(constraints.penalty, [ref, ref])]
        between()
        gradients.backward(context, sum(terms))
        return apply(ref, kept, context)


def off(ref, module, x):
    """The largest error of such a gradient."""
    ours = with_penalty(ref, x)
    loss = loss_of(module, x) + 2 * constraints.penalty(module)
    parameters = dict(module.named_parameters())
    theirs = torch.autograd.grad(loss, parameters.values())
    return max_difference(ours, dict(zip(parameters, theirs, strict=True)))


@torch.no_grad()
def value(*models):
    """A penalty without its graph, for which no context is needed."""
    return constraints.penalty(*models).item()


def message(function, *args):
    try:
        return str(function(*args))
    except RuntimeError as error:
        return str(error)


def play(server, rank):
    """What a trainer finds out, beside another one that calls the same module."""
    torch.manual_seed(rank)
    ref, module = remote(server, Tail, 3, name="shared"), Tail(seed=3)
    inputs = [torch.randn(4, 6, **F64) for _ in range(25)]
    found = {"shared": max(off(ref, module, x) for x in inputs)}
    if rank > 0:
        return found
    module = RemoteModule(f"{server}/cpu", Tail).get_module_rref()
    found["remote module"] = off(module, Tail(), inputs[0])
    with mock.patch.object(gradients, "_cuts", True):  # no distributed autograd
        found["cut"] = off(remote(server, Tail, name="tail"), Tail(), inputs[0])
    return {"off": found} | several(server) | interrupted("spoilt")


def several(server):
    """All kinds of models together; then they are projected."""
    module = RemoteModule(f"{server}/cpu", Tail, (3,))
    named = remote(server, Tail, 2, name="second")
    given = Tail(0), rpc.remote(server, Tail, (1,)), named, module
    parts = [Tail(seed) for seed in range(4)]
    found = constraints.feasibility(*given)
    squares = [constraints.feasibility(part).weight ** 2 for part in parts]
    results = {
        "gone": message(constraints.penalty, Ref("nobody", 0)),
        "names": set(found.layers),
        "penalty": (value(*given), sum(map(value, parts))),
        "squares": (found.weight**2, sum(squares)),
    }
    constraints.project_(*given)
    return results | {"projected": constraints.feasibility(*given).weight}


def step(module):
    """On the owner: another trainer's, which moves nothing."""
    move_(module, 1.0)


def compute_on_the_weight_itself():
    """On the owner: from now on, without the copy that protects a call from others."""
    dissolved._for_this_call = lambda weight: weight


def interrupted(server):
    """Gradients if the weights are written to before the backward pass."""
    rref = rpc.remote(server, constraints.dissolve, args=(nn.Linear(6, 4, **F64),))
    args = rref, torch.randn(5, 6, **F64), partial(apply, rref, step)
    protected = message(with_penalty, *args)
    rpc.rpc_sync(server, compute_on_the_weight_itself)
    return {"interrupted": protected, "unprotected": message(with_penalty, *args)}


@pytest.fixture(scope="module")
def played():
    """What two trainers of one server found; the first one spoils another server."""
    roles = {f"trainer{rank}": Role(play, ("ps", rank)) for rank in range(2)}
    servers = dict.fromkeys(("ps", "spoilt"), Role(serve))
    return launch(roles | servers, deadline=120)


class TestRemote:
    def test_gradients_on_the_owner_are_those_of_one_process(self, played):
        """Also while two trainers call the same module."""
        off = [*played["trainer1"].values(), *played["trainer0"]["off"].values()]
        assert len(off) == 4 and max(off) <= 1e-14

    def test_a_step_of_another_may_come_before_the_backward_pass(self, played):
        """It could not if the layer computed with the weight itself."""
        found = played["trainer0"]
        assert "parametrizations.weight" in found["interrupted"]
        assert "modified by an inplace" in found["unprotected"]

    def test_all_models_count(self, played):
        found, names = played["trainer0"], {"0.weight", "2.weight"}
        assert found["names"] == {f"{n}.{name}" for n in range(4) for name in names}
        for what in "penalty", "squares":
            ours, expected = found[what]
            assert ours == pytest.approx(expected, rel=1e-12)
        assert ours > 0.01 and found["projected"] < 1e-12
        assert "nobody" in found["gone"]
