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


class Bag(nn.EmbeddingBag):
    """A table that dissolves itself, for a RemoteModule."""

    def __init__(self):
        super().__init__(9, 6, **F64)
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(0))
        constraints.dissolve(self)
        move_(self, 1.2)


def loss_of(model, x):
    return model(x).square().sum()


def kept(module, context):
    """On the owner: a context's gradient of each parameter."""
    found = gradients.gradients(context, module.parameters())
    return {name: found[p] for name, p in module.named_parameters()}


def with_penalty(ref, x, penalties=1, between=lambda: None):
    """Gradients, on the owner, of a loss and penalties."""
    with gradients.context() as context:
        terms = [gradients.call(ref, loss_of, x)]
        terms += [constraints.penalty(ref) for _ in range(penalties)]
        between()
        gradients.backward(context, sum(terms))
        return apply(ref, kept, context)


def locally(module, x, penalties=1):
    """The same in this process."""
    loss = loss_of(module, x) + penalties * constraints.penalty(module)
    found = torch.autograd.grad(loss, list(module.parameters()))
    return dict(zip(dict(module.named_parameters()), found, strict=True))


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


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
    """What a trainer finds out."""
    torch.manual_seed(rank)
    concurrent = with_others(server)
    if rank > 0:
        return concurrent
    gradients = equality(server) | {"concurrent": concurrent}
    return {"gradients": gradients} | several(server) | interrupted("spoilt")


def with_others(server):
    """The largest error of a gradient while others call the same module."""
    ref, module = remote(server, Tail, 3, name="shared"), Tail(seed=3)
    inputs = [torch.randn(4, 6, **F64) for _ in range(25)]
    return max(difference(with_penalty(ref, x), locally(module, x)) for x in inputs)


def equality(server):
    x, tokens = torch.randn(5, 6, **F64), torch.tensor([[0, 4], [8, 4]])
    tail, bag = rpc.remote(server, Tail), RemoteModule(f"{server}/cpu", Bag)
    named = remote(server, Tail, name="tail")
    once, twice = (locally(Tail(), x, n) for n in (1, 2))
    with mock.patch.object(gradients, "_cuts", True):  # no distributed autograd
        cut = with_penalty(named, x, 2)
    of_bag = with_penalty(bag.get_module_rref(), tokens)
    return {
        "rref": difference(with_penalty(tail, x), once),
        "twice": difference(with_penalty(tail, x, 2), twice),
        "by name": difference(with_penalty(named, x, 2), twice),
        "cut, twice": difference(cut, twice),
        "remote module": difference(of_bag, locally(Bag(), tokens)),
        "no penalty": difference(once, locally(Tail(), x, 0)),
    }


def several(server):
    """All kinds of models together, one of them twice; then they are projected."""
    tail, bag = rpc.remote(server, Tail), RemoteModule(f"{server}/cpu", Bag)
    named = remote(server, Tail, 2, name="second")
    given = Tail(seed=1), tail, named, tail, bag
    parts = Tail(1), Tail(), Tail(2), Bag()
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
    args = rref, torch.randn(5, 6, **F64), 1, partial(apply, rref, step)
    protected = message(with_penalty, *args)
    rpc.rpc_sync(server, compute_on_the_weight_itself)
    return {"interrupted": protected, "unprotected": message(with_penalty, *args)}


@pytest.fixture(scope="module")
def played():
    """What two trainers of one server found; the first one spoils another server."""
    roles = {f"trainer{rank}": Role(play, ("ps", rank)) for rank in range(2)}
    servers = dict.fromkeys(("ps", "spoilt"), Role(serve))
    return launch(roles | servers, deadline=120)


@pytest.fixture
def found(played):
    return played["trainer0"]


class TestRemote:
    def test_gradients_on_the_owner_are_those_of_one_process(self, played, found):
        """Also while two trainers call the same module."""
        off = dict(found["gradients"])
        assert off.pop("no penalty") > 0.01
        assert played["trainer1"] <= 1e-14 and max(off.values()) <= 1e-14

    def test_a_step_of_another_may_come_before_the_backward_pass(self, found):
        """It could not if the layer computed with the weight itself."""
        assert "parametrizations.weight" in found["interrupted"]
        assert "modified by an inplace" in found["unprotected"]

    def test_all_models_count_and_each_of_them_once(self, found):
        tails = {f"{number}.{layer}.weight" for number in (0, 1, 2) for layer in (0, 2)}
        assert found["names"] == tails | {"4.weight"}
        for what in "penalty", "squares":
            ours, expected = found[what]
            assert ours == pytest.approx(expected, rel=1e-12)
        assert ours > 0.01 and found["projected"] < 1e-12
        assert "nobody" in found["gone"]
